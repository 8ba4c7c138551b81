from eval.chips.tpu_compile import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.tpu_compile")
