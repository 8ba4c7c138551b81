"""Layers around attention that sorts or ranks tokens."""
