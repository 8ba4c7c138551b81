"""Attention to keys and values that are projected along the length; `reference.py` has the plain form."""
