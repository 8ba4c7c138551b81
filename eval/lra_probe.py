from eval.tasks.lra_probe import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.lra_probe")
