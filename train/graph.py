"""Trains networks that classify the nodes of a graph: python -m train.graph PRESET --data_dir DIR [OPTIONS].

PRESET is DATASET-NETWORK, such as acm-brl. docs/graphs.md has the files; `python -m eval.graph --workdir DIR` measures
the test nodes.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.graph import GRAPH

main = functools.partial(train_main, [GRAPH], name="train.graph")

if __name__ == "__main__":
    start(main, "train.graph")
