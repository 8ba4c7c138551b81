from eval.studies.gradient_std import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.gradient_std")
