"""Recurrences over chunks of tokens: linear attention, with and without decay, and the delta rule."""
