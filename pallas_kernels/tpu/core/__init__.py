"""What the TPU kernels share: inputs, the layout of heads, block sizes, scores."""
