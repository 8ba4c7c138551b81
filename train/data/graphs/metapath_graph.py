"""The graph that HAN reads: nodes of one type, and a kind of links for each metapath from one of them to another."""

from __future__ import annotations

import dataclasses
import functools
import operator

import numpy as np
import scipy.sparse as sp

from train.data.graphs.graph import Graph, Relation
from train.data.graphs.poly_tokens import metapaths, walk
from train.engine.errors import UserError


def metapath_graph(graph: Graph, longest: int, neighbours: int) -> Graph:
    """The nodes of a graph's target type, which receive along each metapath of at most `longest` links from the nodes
    at its end and from themselves (HAN, Wang et al. 2019, arXiv:1903.07293, definition 3).

    Args:
      neighbours: how many random walks draw a node's neighbours along each metapath; 0 for all neighbours.

    Raises:
      UserError: no metapath ends at the target type.
    """
    target, relations, count = graph.target, graph.relations, graph.counts[graph.target]
    rng, found = np.random.default_rng(7), []
    for path in metapaths(relations, target, longest):
        if relations[path[-1]].sender != target:
            continue
        if neighbours:
            ends = walk(relations, path, np.arange(count), neighbours, rng)
            starts, drawn = np.nonzero(ends >= 0)
            ones = np.ones(len(starts), np.float32)
            links = sp.csr_matrix((ones, (starts, ends[starts, drawn])), shape=(count, count))
        else:
            links = functools.reduce(operator.matmul, (relations[i].adjacency for i in path))
        links = (links + sp.identity(count, np.float32)).tocsr()
        found.append(Relation("-".join(relations[i].name for i in path), 0, 0, links))
    if not found:
        raise UserError(
            f"--metapath_length: expected more than {longest}: no metapath leads back to the classified type"
        )
    return dataclasses.replace(
        graph, types=(graph.types[target],), counts=(count,), features=(graph.features[target],),
        relations=tuple(found), target=0,
    )  # fmt: skip
