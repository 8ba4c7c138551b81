"""The same training on many meshes, for each listed mechanism: python -m eval.mesh_check [--task NAME]."""

from eval.chips.mesh_check import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.mesh_check")
