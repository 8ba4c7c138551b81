"""Compares TLinFormer's operations with its equations: python -m eval.tlinformer_operations [--picture FILE.png]."""

from eval.harness.entry import start
from eval.studies.tlinformer_operations import main

if __name__ == "__main__":
    start(main, "eval.tlinformer_operations")
