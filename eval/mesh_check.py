"""The same training on many meshes, for each listed mechanism: python -m eval.mesh_check [--task NAME]."""

from eval.chips.mesh_check import main
from eval.harness.entry import start

if __name__ == "__main__":
    start(main, "eval.mesh_check")
