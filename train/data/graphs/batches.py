"""Batches of nodes to classify: rows of token lists, or rows of subgraphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from train.data.graphs.poly_tokens import PolyTokens
from train.data.graphs.subgraphs import Subgraphs
from train.data.repeated import HeldOutBatches, RepeatedBatches, RowNumbers, chosen_rows
from train.engine.batch import Batch
from train.engine.errors import UserError

Source = PolyTokens | Subgraphs


def make_row_batch(
    source: Source, nodes: np.ndarray, labels: np.ndarray, seeds: Sequence[Any], has_edges: bool
) -> Batch:
    """A batch of some rows.

    Args:
      source: makes the rows. nodes: (B, P), -1 for none; P is 1 for token lists. labels: (B, P) or (B, P, C).
      seeds: one for each row. has_edges: whether the network reads edges.
    """
    exist = nodes >= 0
    nodes = np.maximum(nodes, 0)
    targets = {
        "targets": labels.astype(np.int32),
        "weights": exist.astype(np.float32),
    }
    if isinstance(source, PolyTokens):
        features, present = source.rows(nodes[:, 0])
        return Batch({"present": present, "features": features, **targets})
    drawn = [source.draw(row, seed) for row, seed in zip(nodes, seeds)]
    names = ("present", "features", "places", *(("edges", "relations") if has_edges else ()))
    return Batch({**{name: np.stack([getattr(each, name) for each in drawn]) for name in names}, **targets})


class NodeBatches(RepeatedBatches):
    """Endless training batches; each pass has every node at most once, in a new order.

    A batch is what `NodeClassifier` takes, with "targets" (B, P) int32 (or (B, P, C) zeros and ones), "weights" (B, P)
    float32; P is `targets`. The remainder of less than a batch, different in each pass, is left out; where there are
    fewer nodes than a batch has places for, all are in it, and the other places have weight 0.
    """

    def __init__(
        self,
        source: Source,
        nodes: np.ndarray,
        labels: np.ndarray,
        *,
        batch: int,
        targets: int,
        seed: int,
        digest: str,
        has_edges: bool,
        rows: RowNumbers = None,
    ):
        chosen = chosen_rows(batch, rows)
        size = batch * targets
        if targets == 1 and len(nodes) < batch:
            raise UserError(f"--batch: expected at most the {len(nodes)} training nodes, got {batch}")
        steps = max(len(nodes) // size, 1)

        def make(index: int, step: int) -> Batch:
            order = np.random.default_rng([seed, index // steps]).permutation(len(nodes))
            at = np.full(size, -1)
            own = order[step * size : (step + 1) * size]
            at[: len(own)] = own
            at = at.reshape(batch, targets)[chosen]
            seeds = [[13, seed, index, int(row)] for row in chosen]
            return make_row_batch(source, np.where(at < 0, -1, nodes[at]), labels[at], seeds, has_edges)

        identity = {"batch": batch, "targets": targets, "seed": seed, "nodes": len(nodes), "digest": digest}
        super().__init__(make, steps, identity)


class HeldOutNodes(HeldOutBatches):
    """One pass over a split, every node once, in its order; the last batch is filled with nodes of weight 0.

    Takes the arguments of `NodeBatches` and gives the same kind of batches; subgraphs are the same each time.
    """

    def __init__(
        self,
        source: Source,
        nodes: np.ndarray,
        labels: np.ndarray,
        *,
        batch: int,
        targets: int,
        has_edges: bool,
        rows: RowNumbers = None,
    ):
        chosen = chosen_rows(batch, rows)
        steps = -(-len(nodes) // (batch * targets))
        filled = np.full(steps * batch * targets, -1)
        filled[: len(nodes)] = np.arange(len(nodes))
        plan = filled.reshape(steps, batch, targets)

        def make(step: int) -> Batch:
            at = plan[step, chosen]
            seeds = [[17, step, int(row)] for row in chosen]
            return make_row_batch(source, np.where(at < 0, -1, nodes[at]), labels[at], seeds, has_edges)

        super().__init__(make, steps, batch)
