"""Softmax attention over any pattern of blocks, with lists that are made on the host."""
