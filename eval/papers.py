"""The papers' tables next to runs: python -m eval.papers TABLE [--runs DIR] [--cost True]."""

from eval.harness.entry import start
from eval.tasks.papers import main

if __name__ == "__main__":
    start(main, "eval.papers")
