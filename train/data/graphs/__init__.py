"""Graphs whose nodes are classified: their files, the token lists of their nodes, and batches of both."""
