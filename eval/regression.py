from eval.tasks.regression import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.regression")
