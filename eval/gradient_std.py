"""How much the gradients of runs varied: python -m eval.gradient_std --workdir DIR [DIR ...]."""

from eval.harness.entry import start
from eval.studies.gradient_std import main

if __name__ == "__main__":
    start(main, "eval.gradient_std")
