from eval.chips.tpu_schedule import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.tpu_schedule")
