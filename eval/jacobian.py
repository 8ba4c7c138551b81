"""How strongly outputs depend on far inputs: python -m eval.jacobian --workdir DIR [DIR ...] [--picture FILE.png]."""

from eval.studies.jacobian import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.jacobian")
