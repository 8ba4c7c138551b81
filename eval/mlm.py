"""Measures a masked language model on held-out text: python -m eval.mlm --workdir DIR."""

from eval.harness.entry import start
from eval.tasks.mlm import main

if __name__ == "__main__":
    start(main, "eval.mlm")
