"""Attention that sorts or ranks tokens: `reference.py` gives the plain meaning."""
