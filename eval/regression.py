"""Compares in-context regression with least squares: python -m eval.regression --workdir DIR."""

from eval.harness.entry import start
from eval.tasks.regression import main

if __name__ == "__main__":
    start(main, "eval.regression")
