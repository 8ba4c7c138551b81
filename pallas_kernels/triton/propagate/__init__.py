"""Cross-attention from all tokens to a few compressed tokens."""
