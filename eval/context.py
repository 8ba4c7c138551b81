from eval.tasks.context import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.context")
