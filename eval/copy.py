"""Measures what an encoder-decoder writes by itself: python -m eval.copy --workdir DIR [--length N ...]."""

from eval.harness.entry import start
from eval.tasks.copy import main

if __name__ == "__main__":
    start(main, "eval.copy")
