"""Which tokens BRL's compressed tokens connect: python -m eval.regularizer --workdir DIR [--picture FILE.png]."""

from eval.studies.regularizer import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.regularizer")
