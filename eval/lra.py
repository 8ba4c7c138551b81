"""Measures classifiers of the Long Range Arena on their test split: python -m eval.lra --workdir DIR."""

from eval.tasks.lra import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.lra")
