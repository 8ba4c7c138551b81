"""The versions that an environment has of what the library stands on: python -m eval.versions."""

from eval.chips.versions import main
from eval.harness.entry import start

if __name__ == "__main__":
    start(main, "eval.versions")
