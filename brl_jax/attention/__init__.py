"""Attention mechanisms as pure functions: arrays in, arrays out. No Flax, no I/O, no device queries.

A family is a folder and a backend is a file. In a family the public function has a file of its own, `reference.py`
gives the plain meaning in a few dense lines, and one file a backend holds the fast form. What families share is in
`core`.
"""
