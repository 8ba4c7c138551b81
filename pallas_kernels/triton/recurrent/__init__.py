"""Recurrences over chunks: sums of outer products with and without decay, and the delta rule."""
