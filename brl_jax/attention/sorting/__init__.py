"""Attention that sorts or ranks tokens; `reference.py` has the plain forms."""
