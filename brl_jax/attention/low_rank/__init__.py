"""Attention through few tokens: projections along the length, segment means, or samples. `reference.py` has the
plain forms."""
