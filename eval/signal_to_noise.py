from eval.studies.signal_to_noise import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.signal_to_noise")
