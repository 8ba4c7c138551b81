"""What the GPU kernels cost, by the compiler's own counts and without a GPU: python -m eval.gpu_costs."""

from eval.chips.gpu_costs import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.gpu_costs")
