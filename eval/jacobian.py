"""How strongly outputs depend on far inputs: python -m eval.jacobian --workdir DIR [DIR ...] [--picture FILE.png]."""

from eval.harness.entry import start
from eval.studies.jacobian import main

if __name__ == "__main__":
    start(main, "eval.jacobian")
