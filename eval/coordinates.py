"""How activations grow with the width in the first steps of training: python -m eval.coordinates [OPTIONS]."""

from eval.studies.coordinates import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.coordinates")
