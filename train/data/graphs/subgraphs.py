"""Subgraphs of fixed size: the nodes to classify, and what they receive from."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from train.data.graphs.graph import Graph, standardise


class Subgraph(NamedTuple):
    """Some nodes and links of a graph, padded.

    Each type has a fixed number of places, and the types follow one another.

    features: (T, F) float32. present: (T,) int32, which places have a node. edges: (E, 2) int32, senders and receivers,
    sorted by receiver; T as the receiver of those that don't exist. relations: (E,) int32. places: (P,) int32, of
    the nodes that were asked for.
    """

    features: np.ndarray
    present: np.ndarray
    edges: np.ndarray
    relations: np.ndarray
    places: np.ndarray


class Subgraphs:
    """Draws subgraphs around nodes of a graph's target type, all of one size. Each type's features are standardised
    over its nodes, as for token lists.

    Attributes:
      kinds: the node type of each place. features: of each type's nodes, standardised.

    Args:
      graph: the graph. hops: how many links a message passes along. neighbours: the links drawn for each node that
        receives; 0 for all, and then every subgraph is the graph. targets: nodes that are asked for at a time.
    """

    def __init__(self, graph: Graph, *, hops: int, neighbours: int, targets: int):
        self._graph, self._hops, self._neighbours = graph, hops, neighbours
        self._starts = np.cumsum([0, *graph.counts])
        self.features = [features.copy() for features in graph.features]
        for features in self.features:
            standardise(features, np.ones(len(features), bool))
        receivers, senders, kinds = [], [], []
        for i, relation in enumerate(graph.relations):
            links = relation.adjacency.tocoo()
            receivers.append(links.row + self._starts[relation.receiver])
            senders.append(links.col + self._starts[relation.sender])
            kinds.append(np.full(links.nnz, i))
        joined = [np.concatenate([np.zeros(0, np.int64), *parts]) for parts in (receivers, senders, kinds)]
        order = np.argsort(joined[0], kind="stable")
        self._receivers, self._senders, self._kinds = (part[order] for part in joined)
        nodes = int(self._starts[-1])
        self._indptr = np.searchsorted(self._receivers, np.arange(nodes + 1))
        limit, links = nodes, len(order)
        if neighbours:
            new = [targets * neighbours**hop for hop in range(hops + 1)]
            limit, links = sum(new), min(links, sum(new[1:]))
        self._room = np.array([min(count, limit) for count in graph.counts])
        self._places = np.cumsum([0, *self._room])
        self._links = links
        self.kinds = tuple(int(kind) for kind in np.repeat(np.arange(len(self._room)), self._room))
        self._whole: Subgraph | None = None

    def draw(self, nodes: np.ndarray, seed: Any) -> Subgraph:
        """The subgraph of some nodes of the target type (P,), whose links a seed of numpy's chooses."""
        wanted = nodes + self._starts[self._graph.target]
        if not self._neighbours:
            if self._whole is None:
                whole = np.arange(self._starts[-1])
                self._whole = self._padded(whole, np.arange(len(self._senders)))
            return self._whole._replace(places=wanted.astype(np.int32))
        rng = np.random.default_rng(seed)
        seen, frontier = np.unique(wanted), np.unique(wanted)
        chosen = [np.zeros(0, np.int64)]
        for _ in range(self._hops):
            chosen.append(self._links_of(frontier, rng))
            frontier = np.setdiff1d(self._senders[chosen[-1]], seen)
            seen = np.union1d(seen, frontier)
        drawn = self._padded(seen, np.sort(np.concatenate(chosen)))
        return drawn._replace(places=self._place(seen, wanted).astype(np.int32))

    def _links_of(self, nodes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """At most `neighbours` of the links that end in each node."""
        degree = self._indptr[nodes + 1] - self._indptr[nodes]
        owner = np.repeat(np.arange(len(nodes)), degree)
        first = np.cumsum(degree) - degree
        links = np.arange(len(owner)) - first[owner] + self._indptr[nodes][owner]
        order = np.lexsort((rng.random(len(links)), owner))
        rank = np.arange(len(owner)) - first[owner]
        return links[order][rank < self._neighbours]

    def _place(self, seen: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        """The places of some nodes in the subgraph of the sorted nodes `seen`."""
        kind = np.searchsorted(self._starts, nodes, side="right") - 1
        first = np.searchsorted(seen, self._starts[:-1])
        return np.searchsorted(seen, nodes) - first[kind] + self._places[kind]

    def _padded(self, seen: np.ndarray, links: np.ndarray) -> Subgraph:
        size = int(self._places[-1])
        places = self._place(seen, seen)
        features = np.zeros((size, self.features[0].shape[1]), np.float32)
        for kind, rows in enumerate(self.features):
            own = (seen >= self._starts[kind]) & (seen < self._starts[kind + 1])
            features[places[own]] = rows[seen[own] - self._starts[kind]]
        present = np.zeros(size, np.int32)
        present[places] = 1
        edges = np.full((self._links, 2), size, np.int32)
        edges[:, 0] = 0
        ends = np.stack(
            [self._place(seen, self._senders[links]), self._place(seen, self._receivers[links])], 1
        )
        edges[: len(links)] = ends
        relations = np.zeros(self._links, np.int32)
        relations[: len(links)] = self._kinds[links]
        return Subgraph(features, present, edges, relations, np.zeros(0, np.int32))
