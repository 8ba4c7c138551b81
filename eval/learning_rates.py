"""Which learning rate is best at which width: python -m eval.learning_rates [OPTIONS]."""

from eval.harness.entry import start
from eval.studies.learning_rates import main

if __name__ == "__main__":
    start(main, "eval.learning_rates")
