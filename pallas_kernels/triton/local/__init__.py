"""Softmax attention over any pattern of blocks, with lists that the host makes."""
