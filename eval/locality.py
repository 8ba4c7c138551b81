"""How local a trained model's attention is: python -m eval.locality --workdir DIR [DIR ...]."""

from eval.harness.entry import start
from eval.studies.locality import main

if __name__ == "__main__":
    start(main, "eval.locality")
