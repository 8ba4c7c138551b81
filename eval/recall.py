"""Measures recall: python -m eval.recall --workdir DIR [--length N ... --pairs P ...]."""

from eval.harness.entry import start
from eval.tasks.recall import main

if __name__ == "__main__":
    start(main, "eval.recall")
