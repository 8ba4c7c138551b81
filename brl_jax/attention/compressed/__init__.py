"""Compressed tokens: cross-attention from a long history into a few tokens, and from those back to all tokens."""
