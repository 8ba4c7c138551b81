"""TLinFormer's network: windows that read their history through a small context."""
