"""Local attention: exact softmax attention over a sparse pattern, at linear cost."""
