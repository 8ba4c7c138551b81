"""Measures networks that classify the nodes of a graph (train.graph): python -m eval.graph --workdir DIR [OPTIONS]."""

from eval.tasks.graph import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.graph")
