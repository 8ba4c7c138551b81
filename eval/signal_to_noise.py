"""How well BRL's compressed tokens tell records from noise: python -m eval.signal_to_noise --workdir DIR [DIR ...]."""

from eval.harness.entry import start
from eval.studies.signal_to_noise import main

if __name__ == "__main__":
    start(main, "eval.signal_to_noise")
