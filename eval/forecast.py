"""Compares forecasts on the test split with naive ones: python -m eval.forecast --workdir DIR [DIR ...]."""

from eval.harness.entry import start
from eval.tasks.forecast import main

if __name__ == "__main__":
    start(main, "eval.forecast")
