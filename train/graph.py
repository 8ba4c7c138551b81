"""Trains networks that classify the nodes of a graph: python -m train.graph PRESET --data_dir DIR [OPTIONS].

PRESET is DATASET-NETWORK (`--presets` lists them): acm-brl, dblp-simple_hgn, 20news-local, ... DIR is a folder in the
format of the Heterogeneous Graph Benchmark (node.dat, link.dat, label.dat, label.dat.test), a folder of posts
(train.jsonl, test.jsonl), or an .npz file with "features" and "labels" or with images. `python -m eval.graph --workdir
DIR` measures the run on the test nodes.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.graph import GRAPH

main = functools.partial(train_main, [GRAPH], name="train.graph")

if __name__ == "__main__":
    start(main, "train.graph")
