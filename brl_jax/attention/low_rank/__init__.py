"""Attention over keys and values that are projected along the length."""
