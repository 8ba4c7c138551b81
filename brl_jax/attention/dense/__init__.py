"""Attention of every query to every key, or to every key of its block; `reference.py` has the plain forms."""
