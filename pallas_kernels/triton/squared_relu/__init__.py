"""Attention with squared ReLU in place of the softmax, over a contiguous range of keys for each query."""
