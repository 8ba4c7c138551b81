"""Attention of each query to blocks of keys of its own, listed in an array."""
