"""Block-sparse attention."""
