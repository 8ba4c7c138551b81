"""Shared by the TPU kernels: inputs, the layout of heads, arithmetic, chips and their memory."""
