"""The token list of a node, by node type and metapath (Lu et al., IJCAI 2024: poly-tokens of PHGT).

A metapath is a sequence of relations that starts at the node. The list has, in this order,

    the node itself;
    for each metapath, the mean of the nodes at its end (a semantic token), standardised over all nodes' tokens;
    for each metapath of one or two links, some nodes drawn by random walks along it (node tokens);
    the centres of clusters of all nodes of the node's type (global tokens).

Tokens of one place in this order have one kind, those drawn along one metapath too. A node from which no path starts,
and a node that was drawn before, leave a token absent. HAN reads a graph of the same metapaths instead
(`metapath_graph`).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from train.data.graphs.graph import Graph, Relation, averaging, standardise
from train.engine.errors import UserError

Metapath = tuple[int, ...]


def metapaths(relations: Sequence[Relation], start: int, longest: int) -> list[Metapath]:
    """The sequences of at most `longest` relations that start at a node type, short ones first."""
    found: list[Metapath] = [()]
    for path in found:
        if len(path) < longest:
            at = relations[path[-1]].sender if path else start
            found += [(*path, i) for i, relation in enumerate(relations) if relation.receiver == at]
    return found[1:]


class PolyTokens:
    """The token lists of all nodes of a graph's target type.

    Attributes:
      kinds: the kind of each token. length: tokens of a list.
    """

    def __init__(self, graph: Graph, *, metapath_length: int, neighbours: int, clusters: int):
        self._graph = graph
        target, width = graph.target, graph.features[0].shape[1]
        paths = metapaths(graph.relations, target, metapath_length)
        means = [averaging(relation.adjacency) for relation in graph.relations]

        @functools.cache
        def mean(path: Metapath, kind: int) -> tuple[Any, Any]:
            """(features, shares of existing ends) of each node of a type, along a path."""
            if not path:
                return graph.features[kind], np.ones(graph.counts[kind], np.float32)
            features, exists = mean(path[1:], graph.relations[path[0]].sender)
            return means[path[0]] @ features, means[path[0]] @ exists

        count = graph.counts[target]
        self._means = np.empty((count, 1 + len(paths), width), np.float32)
        self._mean_exists = np.ones((count, 1 + len(paths)), bool)
        self._means[:, 0] = graph.features[target]
        for i, path in enumerate(paths, 1):
            self._means[:, i], exists = mean(path, target)
            self._mean_exists[:, i] = exists > 0
        for i in range(len(paths) + 1):
            standardise(self._means[:, i], self._mean_exists[:, i])
        self._drawn = []
        if neighbours:
            rng = np.random.default_rng(7)
            for path in paths:
                if len(path) <= 2:
                    ends = walk(graph.relations, path, np.arange(count), neighbours, rng)
                    self._drawn.append((graph.relations[path[-1]].sender, ends))
        self._centres = _centres(self._means[:, 0], clusters)
        groups = [1] * (1 + len(paths)) + [neighbours] * len(self._drawn) + [clusters] * (clusters > 0)
        self.kinds = tuple(kind for kind, size in enumerate(groups) for _ in range(size))
        self.length = len(self.kinds)
        self.names = ("self", *(self._path_name(path) for path in paths))

    def _path_name(self, path: Metapath) -> str:
        types = self._graph.types
        return "-".join([types[self._graph.target], *(types[self._graph.relations[i].sender] for i in path)])

    def rows(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The features (B, T, F) float32 and which tokens exist (B, T) int32, of some nodes."""
        shape = (len(nodes), self.length)
        features = np.zeros((*shape, self._means.shape[2]), np.float32)
        present = np.zeros(shape, np.int32)
        at = self._means.shape[1]
        features[:, :at], present[:, :at] = self._means[nodes], self._mean_exists[nodes]
        for kind, ends in self._drawn:
            own = ends[nodes]
            features[:, at : at + own.shape[1]] = self._graph.features[kind][own] * (own >= 0)[..., None]
            present[:, at : at + own.shape[1]] = own >= 0
            at += own.shape[1]
        features[:, at:], present[:, at:] = self._centres, 1
        return features, present


def walk(
    relations: Sequence[Relation], path: Metapath, nodes: np.ndarray, number: int, rng: np.random.Generator
) -> np.ndarray:
    """The ends (N, number) of random walks along a path, -1 for a walk that finds no link or ends at another walk's
    end."""
    at = np.repeat(nodes[:, None], number, axis=1)
    for i in path:
        start, links = relations[i].adjacency.indptr, relations[i].adjacency.indices
        degree = np.where(at >= 0, start[at + 1] - start[at], 0)
        step = (rng.random(at.shape) * degree).astype(np.int64)
        safe = np.minimum(start[at] + step, max(len(links) - 1, 0))
        at = np.where(degree > 0, links[safe] if len(links) else -1, -1)
    at = np.sort(at, axis=1)[:, ::-1]
    at[:, 1:][at[:, 1:] == at[:, :-1]] = -1
    return at


def metapath_graph(graph: Graph, longest: int, neighbours: int) -> Graph:
    """The nodes of a graph's target type, which receive along each metapath of at most `longest` links from the nodes
    at its end and from themselves (HAN, Wang et al. 2019, arXiv:1903.07293, definition 3).

    Args:
      neighbours: how many random walks draw a node's neighbours along each metapath; 0 for all neighbours.
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


def _centres(features: np.ndarray, clusters: int) -> np.ndarray:
    if not clusters:
        return np.zeros((0, features.shape[1]), np.float32)
    from sklearn.cluster import MiniBatchKMeans

    found = MiniBatchKMeans(min(clusters, len(features)), n_init=1, random_state=0).fit(features)
    centres = np.asarray(found.cluster_centers_, np.float32)
    return np.pad(centres, ((0, clusters - len(centres)), (0, 0)))
