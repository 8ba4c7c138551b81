"""Language models at equal compute: python -m eval.compute --table DIR [--picture FILE.png]."""

from eval.harness.entry import start
from eval.studies.compute import main

if __name__ == "__main__":
    start(main, "eval.compute")
