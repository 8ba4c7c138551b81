"""The table of all mechanisms, README's few rows of it, and README's picture."""
