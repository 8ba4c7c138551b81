"""Writes a run's network as safetensors: python -m eval.export --workdir DIR --out DIR."""

from eval.harness.entry import start
from eval.tasks.export import main

if __name__ == "__main__":
    start(main, "eval.export")
