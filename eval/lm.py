"""Measures a trained language model on held-out text: python -m eval.lm --workdir DIR."""

from eval.harness.entry import start
from eval.tasks.lm import main

if __name__ == "__main__":
    start(main, "eval.lm")
