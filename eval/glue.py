"""Measures a fine-tuned network on a task of GLUE: python -m eval.glue --workdir DIR."""

from eval.harness.entry import start
from eval.tasks.glue import main

if __name__ == "__main__":
    start(main, "eval.glue")
