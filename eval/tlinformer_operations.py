from eval.studies.tlinformer_operations import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.tlinformer_operations")
