"""Attention through few tokens: projections along the length, segment means, or samples."""
