"""Attention with squared ReLU instead of the softmax, over a contiguous range of keys for each query."""
