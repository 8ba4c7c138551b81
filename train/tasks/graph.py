"""The task of `python -m train.graph`: networks that classify the nodes of a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from brl_jax.models.graph import GraphConfig, NodeClassifier
from train.data.graphs.batches import HeldOutNodes, NodeBatches, Source
from train.data.graphs.graph import Graph
from train.data.graphs.load import load_graph
from train.data.graphs.metapath_graph import metapath_graph
from train.data.graphs.poly_tokens import PolyTokens
from train.data.graphs.subgraphs import Subgraphs
from train.engine.batch import Arrays
from train.engine.mesh import host_rows
from train.engine.mup import make_rates
from train.engine.step import Objective, classification, outputs, weighted_sums
from train.tasks.graph_config import PRESETS, GraphRunConfig
from train.tasks.task import Task

EDGE_LOSS = 1.0
"""The weight of NodeFormer's loss on edges, the mean over its layers, in training."""


class GraphData(NamedTuple):
    """A graph, and what makes the rows of a run of it."""

    graph: Graph
    source: Source


def _shapes(config: GraphConfig, rows: int, targets: int, edges: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a batch."""
    tokens = len(config.kinds)
    floats = {"features": (rows, tokens, config.num_features), "weights": (rows, targets)}
    classes = (config.num_classes,) if config.multi_label else ()
    integers = {"present": (rows, tokens), "targets": (rows, targets, *classes)}
    if config.network != "tokens":
        integers["places"] = (rows, targets)
    if config.has_edges:
        integers |= {"edges": (rows, edges, 2), "relations": (rows, edges)}
    return {
        **{name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in integers.items()},
        **{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in floats.items()},
    }


def _targets_of_row(config: GraphRunConfig, graph: Graph) -> int:
    """The training nodes of a row where the rows of a batch share all of them."""
    return -(-len(graph.splits["train"][0]) // config.loop.batch)


def apply_to(
    model: NodeClassifier, params: Any, batch: Arrays, key: Array | None = None, **options: Any
) -> Any:
    """The logits (B, P, C) of a batch; without dropout if key is None."""
    options |= {name: batch[name] for name in ("places", "edges", "relations") if name in batch}
    return outputs(model, params, key, batch["features"], batch["present"], **options)


def graph_objective(model: NodeClassifier, z_loss: float = 0.0) -> Objective:
    """Cross-entropy and accuracy of the nodes' classes. Where nodes may have several, the mean over the classes of
    their binary cross-entropy, and the mean over the nodes of their own F1 scores. The accuracy or this score selects
    the checkpoint: the loss rises again while they still get better. In training, a network's loss on edges is added.

    Raises:
      ValueError: z_loss without a softmax.
    """
    config = model.config
    if config.multi_label and z_loss:
        raise ValueError(f"z_loss must be 0 where nodes may have several classes, got {z_loss}")
    score = "node_f1" if config.multi_label else "accuracy"

    def init(key: Array) -> Any:
        batch: dict[str, Any] = {
            name: jnp.zeros(x.shape, x.dtype) for name, x in _shapes(config, 1, 1, 1).items()
        }
        arguments: dict[str, Any] = {
            name: batch[name] for name in ("places", "edges", "relations") if name in batch
        }
        return model.init(key, batch["features"], batch["present"], **arguments)["params"]

    def loss(params: Any, memory: Any, batch: Arrays, key: Array | None):
        targets = batch["targets"]
        logits, sown = apply_to(model, params, batch, key, mutable=["losses"])
        if config.multi_label:
            nll = optax.sigmoid_binary_cross_entropy(logits, targets.astype(jnp.float32)).mean(axis=-1)
            answers, true = logits > 0, targets > 0
            sizes = (answers.astype(jnp.float32) + true.astype(jnp.float32)).sum(axis=-1)
            right = 2.0 * (answers & true).astype(jnp.float32).sum(axis=-1) / jnp.maximum(sizes, 1.0)
        else:
            nll, right = classification(logits, targets, key, z_loss)
        on_edges = jax.tree.leaves(sown)
        if on_edges and key is not None:
            nll = nll + EDGE_LOSS * sum(jnp.mean(loss) for loss in on_edges) / len(on_edges)
        return weighted_sums(nll, batch["weights"], memory, **{score: right})

    return Objective(init, loss, averages=(score,), best=score, rates=make_rates(config))


class GraphTask(Task[GraphRunConfig, GraphData]):
    """Node classification."""

    name = "graph"
    about = "Trains a network to classify the nodes of a graph."
    config_class = GraphRunConfig
    presets = PRESETS
    default_preset = "acm-brl"
    is_sized_by_data = True

    def sized(self, config: GraphRunConfig, data: GraphData | None = None) -> GraphRunConfig:
        """The graph decides the kinds of tokens and nodes, and the classes; if it is not read, the defaults do."""
        row_targets = 1 if config.model.network == "tokens" else config.data.row_targets
        if data is None:
            planned = dataclasses.replace(config.data, row_targets=max(row_targets, 1))
            return dataclasses.replace(config, data=planned)
        graph = data.graph
        row_targets = row_targets or _targets_of_row(config, graph)
        model = dataclasses.replace(
            config.model,
            kinds=data.source.kinds,
            num_features=graph.features[0].shape[1],
            num_relations=max(len(graph.relations), 1),
            num_classes=graph.num_classes,
            multi_label=graph.is_multi_label,
        )
        return dataclasses.replace(
            config, model=model, data=dataclasses.replace(config.data, row_targets=row_targets)
        )

    def model(self, config: GraphRunConfig) -> NodeClassifier:
        return NodeClassifier(config.model)

    def objective(self, model: NodeClassifier, config: GraphRunConfig) -> Objective:
        return graph_objective(model, config.z_loss)

    def batch_shapes(self, config: GraphRunConfig, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        # The number of edges changes no parameter; the configuration does not have it.
        return _shapes(config.model, rows, config.data.row_targets, len(config.model.kinds))

    def load(self, config: GraphRunConfig, splits: Sequence[str]) -> GraphData:
        graph = load_graph(config.data)
        data, network = config.data, config.model.network
        if network == "tokens":
            return GraphData(
                graph,
                PolyTokens(
                    graph,
                    metapath_length=data.metapath_length,
                    neighbours=data.neighbours,
                    clusters=data.clusters,
                ),
            )
        hops = config.model.num_layers if config.model.has_edges else 0
        if network == "han":
            graph, hops = metapath_graph(graph, data.metapath_length, data.neighbours), 0
        targets = data.row_targets or _targets_of_row(config, graph)
        source = Subgraphs(graph, hops=hops, neighbours=data.neighbours if hops else 0, targets=targets)
        return GraphData(graph, source)

    def describe_data(self, config: GraphRunConfig, data: GraphData) -> str:
        graph = data.graph
        nodes = ", ".join(f"{count:,} {name}" for name, count in zip(graph.types, graph.counts))
        links = sum(relation.adjacency.nnz for relation in graph.relations)
        counts = ", ".join(f"{len(rows):,} {split}" for split, (rows, _) in graph.splits.items())
        return f"{graph.name}, nodes: {nodes}; {links:,} links both ways; classified nodes: {counts}"

    def next_commands(self, config: GraphRunConfig, data: GraphData) -> Sequence[Sequence[str]]:
        return (("eval.graph", "--workdir", config.loop.workdir),)

    def training_stream(self, config: GraphRunConfig, data: GraphData, mesh: Mesh) -> NodeBatches:
        nodes, labels = data.graph.splits["train"]
        return NodeBatches(
            data.source,
            nodes,
            labels,
            batch=config.loop.batch,
            targets=config.data.row_targets,
            seed=config.loop.seed,
            digest=data.graph.digest,
            has_edges=config.model.has_edges,
            rows=host_rows(mesh, config.loop.batch),
        )

    def held_out(
        self, config: GraphRunConfig, data: GraphData, split: str, mesh: Mesh | None = None
    ) -> HeldOutNodes:
        nodes, labels = data.graph.splits[split]
        rows = config.loop.microbatch
        return HeldOutNodes(
            data.source,
            nodes,
            labels,
            batch=rows,
            targets=config.data.row_targets,
            has_edges=config.model.has_edges,
            rows=None if mesh is None else host_rows(mesh, rows),
        )

    def predict(
        self, config: GraphRunConfig, model: NodeClassifier, params: Any, data: GraphData, split: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """The predicted and the true classes of a split's nodes, (N,), or (N, C) zeros and ones, in one order."""
        run = jax.jit(lambda params, batch: apply_to(model, params, batch))
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for batch in self.held_out(config, data, split):
            kept = batch["weights"] > 0
            logits = np.asarray(run(params, batch.arrays))[kept]
            predicted = (logits > 0).astype(np.int32) if config.model.multi_label else logits.argmax(axis=-1)
            found.append((predicted, batch["targets"][kept]))
        predicted, true = (np.concatenate(parts) for parts in zip(*found))
        return predicted, true


GRAPH = GraphTask()
