"""Attention whose past is a state, computed chunk by chunk.

Start with `reference.py`, which has the plain form of each function. `chunk_scan.py` scans the chunks for all
functions; each function's file has its state and its step from one chunk to the next.
"""
