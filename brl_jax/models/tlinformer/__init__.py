"""TLinFormer's network (arXiv:2508.20407): windows that read their history through a small context."""
