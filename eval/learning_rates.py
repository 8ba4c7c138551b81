from eval.studies.learning_rates import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.learning_rates")
