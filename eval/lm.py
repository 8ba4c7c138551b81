"""Measures a trained language model on held-out text: python -m eval.lm --workdir DIR."""

from eval.tasks.lm import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.lm")
