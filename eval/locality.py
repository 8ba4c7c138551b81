"""How local a trained model's attention is: python -m eval.locality --workdir DIR [DIR ...]."""

from eval.studies.locality import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.locality")
