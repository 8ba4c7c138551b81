"""Attention of each query to its own blocks of keys, listed in an array."""
