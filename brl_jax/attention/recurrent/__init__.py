"""Attention whose past is a state, computed chunk by chunk.

`reference.py` gives the plain meaning of each function and is the place to begin. `chunk_scan.py` has the scan over
chunks that all functions share, and each function's own file its state and its step from one chunk to the next.
"""
