"""Times and memory of attention functions and of whole layers, side by side: see `eval.speed.__main__`."""
