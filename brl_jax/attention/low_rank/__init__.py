"""Attention through few tokens: projected along the length, means of segments, or samples; `reference.py` has the
plain forms."""
