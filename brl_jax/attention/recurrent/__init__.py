"""Attention whose past is a state, computed chunk by chunk.

`chunk_scan.py` scans the chunks for all functions. Each function's file has its state and its step from one chunk to
the next.
"""
