"""What programs cost on TPUs and GPUs, from their compilers, and whole training steps on pods."""
