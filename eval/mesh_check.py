from eval.chips.mesh_check import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.mesh_check")
