"""Attention that sorts or ranks tokens."""
