"""Language models at equal compute: python -m eval.compute --table DIR [--picture FILE.png]."""

from eval.studies.compute import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.compute")
