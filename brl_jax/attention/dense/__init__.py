"""Attention of every query to every key; `reference.py` has the plain forms."""
