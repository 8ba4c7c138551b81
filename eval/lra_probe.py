"""What a linear map reads from a trained encoder on the Long Range Arena: python -m eval.lra_probe --workdir RUN."""

from eval.tasks.lra_probe import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.lra_probe")
