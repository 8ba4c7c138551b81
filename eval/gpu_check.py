from eval.chips.gpu_check import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.gpu_check")
