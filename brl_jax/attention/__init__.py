"""Attention mechanisms as pure functions: arrays in, arrays out. No Flax, no I/O, no device queries.

A family is a folder. In it, one file holds the public function, and one file for each backend holds its fast form. What
families share is in `core`. To see what a function computes in a few dense lines of NumPy, read `tests/oracles`, which
has a file for each family.

The letters of shapes, in signatures and docstrings alike:

  B   batch (rows)                      N   query heads
  T   queries, or tokens of a row       K   key/value heads; K divides N, and G = N / K
  S   keys and values                   J   value heads where they differ from K
  M   compressed tokens                 H   head dimension
  C   tokens of a chunk, or blocks      V   head dimension of the values
  D   model width                       F   features of a feature map
  R   rank, or rows of a history        E   width of what a classifier reads

Lower-case letters are sizes of one function or block. A letter after `#` may be 1.
"""
