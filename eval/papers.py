from eval.tasks.papers import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.papers")
