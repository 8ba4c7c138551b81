"""python -m eval.overview: see `eval.studies.overview`."""

from eval.harness.entry import start
from eval.studies.overview.main import main

if __name__ == "__main__":
    start(main, "eval.overview")
