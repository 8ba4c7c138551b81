"""How activations grow with the width in the first steps of training: python -m eval.coordinates [OPTIONS]."""

from eval.harness.entry import start
from eval.studies.coordinates import main

if __name__ == "__main__":
    start(main, "eval.coordinates")
