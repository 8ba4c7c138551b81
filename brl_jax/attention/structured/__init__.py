"""Softmax attention whose scores are structured: multi-level low rank, bilinear forms, heads split by reach."""
