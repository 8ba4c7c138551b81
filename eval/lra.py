"""Measures classifiers of the Long Range Arena on their test split: python -m eval.lra --workdir DIR."""

from eval.harness.entry import start
from eval.tasks.lra import main

if __name__ == "__main__":
    start(main, "eval.lra")
