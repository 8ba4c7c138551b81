"""Where a language model's context pays: python -m eval.context --workdir DIR [DIR ...] [--picture FILE.png]."""

from eval.harness.entry import start
from eval.tasks.context import main

if __name__ == "__main__":
    start(main, "eval.context")
