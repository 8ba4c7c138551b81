"""Continues prompts with a trained language model: python -m eval.generate --workdir DIR --prompt TEXT."""

from eval.harness.entry import start
from eval.tasks.generate import main

if __name__ == "__main__":
    start(main, "eval.generate")
