"""A graph with nodes of several types, in memory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from train.engine.errors import UserError


class Relation(NamedTuple):
    """Links of one kind, in one direction: a node of type `receiver` receives from nodes of type `sender`.

    adjacency: (receivers, senders) CSR, ones where there is a link.
    """

    name: str
    receiver: int
    sender: int
    adjacency: Any


@dataclasses.dataclass(frozen=True)
class RawGraph:
    """What files say of a graph.

    Attributes:
      name: for messages. types: the names of the node types; counts: their numbers of nodes.
      features: for each type a sparse matrix (nodes, features), which may have no columns.
      relations: in both directions.
      target: the type whose nodes have labels.
      nodes, labels: (N,) ints, nodes of that type, and their classes, (N,) ints or, where a node may have several,
        (N, C) zeros and ones. is_test: (N,) bools, which of them are for the test; None if the files don't say.
      num_classes: number of classes.
    """

    name: str
    types: tuple[str, ...]
    counts: tuple[int, ...]
    features: tuple[Any, ...]
    relations: tuple[Relation, ...]
    target: int
    nodes: np.ndarray
    labels: np.ndarray
    is_test: np.ndarray | None
    num_classes: int


@dataclasses.dataclass(frozen=True)
class Graph:
    """A graph ready for training: `features` are float32 arrays (nodes of a type, width), all of one width; `splits`
    maps train, valid and test to nodes of the target type and their labels (see `RawGraph`)."""

    name: str
    types: tuple[str, ...]
    counts: tuple[int, ...]
    features: tuple[np.ndarray, ...]
    relations: tuple[Relation, ...]
    target: int
    splits: Mapping[str, tuple[np.ndarray, np.ndarray]]
    num_classes: int
    digest: str

    @property
    def is_multi_label(self) -> bool:
        """Whether a node may have several classes."""
        return self.splits["train"][1].ndim == 2


def both_ways(
    links: Mapping[str, tuple[int, int, np.ndarray, np.ndarray]], counts: Sequence[int]
) -> tuple[Relation, ...]:
    """The relations of links, and their reverses; one that another one repeats is left out.

    Args:
      links: name -> types of the links' starts and ends, and the starts and ends as places within their types.
    """
    found: list[Relation] = []
    for name, (start, end, starts, ends) in links.items():
        shape = (counts[end], counts[start])
        forth = sp.csr_matrix((np.ones(len(starts), np.float32), (ends, starts)), shape=shape)
        forth.data[:] = 1.0  # links that are named twice were added
        back = sp.csr_matrix(forth.T)
        for relation in (Relation(name, end, start, forth), Relation(f"{name}'", start, end, back)):
            relation.adjacency.sort_indices()
            if not any(_same(relation, other) for other in found):
                found.append(relation)
    return tuple(found)


def _same(a: Relation, b: Relation) -> bool:
    ends = (a.receiver, a.sender) == (b.receiver, b.sender)
    return ends and a.adjacency.nnz == b.adjacency.nnz and (a.adjacency != b.adjacency).nnz == 0


def averaging(adjacency: Any) -> Any:
    """An adjacency whose rows sum to 1, or 0 where a node has no neighbours."""
    degree = np.asarray(adjacency.sum(axis=1)).reshape(-1)
    return sp.diags(1.0 / np.maximum(degree, 1.0)).astype(np.float32) @ adjacency


def split_nodes(raw: RawGraph, split_seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The nodes and labels of each split. Where the files say which nodes are for the test, a fifth of the others is
    for validation, as in the Heterogeneous Graph Benchmark; else a quarter of all is for each of the two, as in
    NodeFormer (arXiv:2306.08385).
    """
    order = np.random.default_rng([11, split_seed]).permutation(len(raw.nodes))
    if raw.is_test is None:
        parts = np.split(order, [len(order) // 2, len(order) * 3 // 4])
    else:
        test = np.flatnonzero(raw.is_test)
        rest = order[~raw.is_test[order]]
        held_out = len(rest) // 5
        parts = [rest[held_out:], rest[:held_out], test]
    splits = dict(zip(("train", "valid", "test"), parts))
    for split, chosen in splits.items():
        if not len(chosen):
            raise UserError(f"--data_dir: {raw.name} has too few labels: none for the split {split}")
    return {split: (raw.nodes[np.sort(at)], raw.labels[np.sort(at)]) for split, at in splits.items()}


def reduced(raw: RawGraph, width: int) -> tuple[np.ndarray, ...]:
    """For each type an array (nodes, width) float32 that describes its nodes; of a smaller width where no type needs
    that many numbers.

    A type whose features are at most `width` numbers keeps them; of more, the principal `width` directions are kept. A
    type without features is described by its neighbours instead: one number for each of its nodes if there are
    at most `width` of them, else the principal directions of its rows of the adjacencies. All entries of a type are
    scaled together, to rows of length sqrt(width) in the mean.
    """
    matrices = [_described(raw, kind, width) for kind in range(len(raw.counts))]
    width = min(width, max(matrix.shape[1] for matrix in matrices))
    found = []
    for matrix in matrices:
        rows = _principal(matrix, width) if matrix.shape[1] > width else matrix.toarray()
        length = float(np.sqrt(np.mean(np.sum(np.square(rows), axis=1))))
        rows = rows * (width**0.5 / length if length else 1.0)
        found.append(np.pad(rows, ((0, 0), (0, width - rows.shape[1]))).astype(np.float32))
    return tuple(found)


def standardise(features: np.ndarray, exists: np.ndarray) -> None:
    """Takes the mean of the existing rows away, in place, and scales them to entries of size 1 in the mean: if all
    rows are similar (means of many nodes, numbers of one sign), the differences between nodes are small in
    comparison."""
    if exists.any():
        features -= features[exists].mean(axis=0)
        size = float(np.sqrt(np.mean(np.square(features[exists]))))
        features /= size or 1.0
    features[~exists] = 0.0


def _described(raw: RawGraph, kind: int, width: int) -> Any:
    """The features of a type's nodes. Nodes without features get their own numbers, or their neighbours."""
    if raw.features[kind].shape[1]:
        return raw.features[kind]
    count = raw.counts[kind]
    if count <= width:
        return sp.identity(count, np.float32, format="csr")
    near = [averaging(relation.adjacency) for relation in raw.relations if relation.receiver == kind]
    return sp.hstack([*near, sp.csr_matrix((count, 1), dtype=np.float32)]).tocsr()


def _principal(matrix: Any, width: int) -> np.ndarray:
    """The rows' coordinates along the first right singular vectors, as many as there are."""
    from sklearn.utils.extmath import randomized_svd

    number = min(width, min(matrix.shape))
    left, values, _ = randomized_svd(matrix, number, n_iter=4, random_state=0)
    return left * values


def digest_of(
    features: Sequence[np.ndarray],
    relations: Sequence[Relation],
    splits: Mapping[str, tuple[np.ndarray, np.ndarray]],
) -> str:
    """A hash of what training depends on."""
    links = (part for each in relations for part in (each.adjacency.indptr, each.adjacency.indices))
    hashed = hashlib.sha256(json.dumps([relation[:3] for relation in relations]).encode())
    for array in (*features, *links, *(part for split in splits.values() for part in split)):
        hashed.update(np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()[:16]
