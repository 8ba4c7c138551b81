"""Which tokens BRL's compressed tokens connect: python -m eval.regularizer --workdir DIR [--picture FILE.png]."""

from eval.harness.entry import start
from eval.studies.regularizer import main

if __name__ == "__main__":
    start(main, "eval.regularizer")
