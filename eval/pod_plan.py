from eval.chips.pod_plan import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.pod_plan")
