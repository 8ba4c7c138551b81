"""The task of `python -m train.graph`: networks that classify the nodes of a graph.

Its presets are DATASET-NETWORK: the Heterogeneous Graph Benchmark's graphs (BRL-Attention's tables 4 and 10), and
20news and images, whose nodes have no links (tables 5 and 9).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from brl_jax.layers import BRLConfig, FullConfig, LocalConfig, Mechanism
from brl_jax.models.graph import GraphConfig, Network, NodeClassifier
from train.data.graphs.batches import HeldOutNodes, NodeBatches, Source
from train.data.graphs.graph import Graph
from train.data.graphs.load import GraphDataConfig, load_graph
from train.data.graphs.poly_tokens import PolyTokens, metapath_graph
from train.data.graphs.subgraphs import Subgraphs
from train.engine.batch import Arrays
from train.engine.config import LoopConfig
from train.engine.fields import Decided, Flat
from train.engine.optimizer import OptimizerConfig
from train.engine.step import Objective, classification, outputs, weighted_sums
from train.tasks.mup import make_rates
from train.tasks.run_config import RunConfig
from train.tasks.task import Task, shapes


@dataclasses.dataclass(frozen=True)
class GraphModelConfig(GraphConfig):
    """The network."""

    # Used while no graph has been read, as when a run is only planned.
    kinds: Decided[tuple[int, ...]] = tuple(range(16))
    num_features: Decided[int] = 32
    num_relations: Decided[int] = 1
    num_classes: Decided[int] = 2
    multi_label: Decided[bool] = False


@dataclasses.dataclass(frozen=True)
class GraphRunConfig(RunConfig):
    """A network trained to classify the nodes of a graph."""

    data: Annotated[GraphDataConfig, Flat]
    model: Annotated[GraphModelConfig, Flat]

    def __post_init__(self):
        if self.model.identities and self.data.neighbours:
            raise ValueError(f"identities need the whole graph, neighbours=0, got {self.data.neighbours}")

    def without_effect(self) -> dict[str, str]:
        network = self.model.network
        lists = ("data.clusters",) if network == "han" else ("data.metapath_length", "data.clusters")
        names = ["model.rope_theta", *(["data.row_targets"] if network == "tokens" else lists)]
        if network in ("nodes", "mlp"):
            names.append("data.neighbours")
        if network not in ("tokens", "nodes"):
            names += ("model.mechanism", "model.late_mechanism", "model.schedule", "model.early_layers")
        return dict.fromkeys(names, f"with network {network}")


# The window is a fifth or less of a token list; BRL-Attention gives neither it nor m for its graphs.
_ATTENTION: dict[str, Mechanism] = {
    "brl": BRLConfig(window=8, num_compressed=8, block_size=None, beta=0.5),
    "local": LocalConfig(window=8),
    "full": FullConfig(),
}
_MESSAGES: tuple[Network, ...] = ("mlp", "gcn", "rgcn", "gat", "simple_hgn", "hgt", "han", "nodeformer")

_METAPATHS = {"acm": 2, "dblp": 4, "imdb": 4, "aminer": 4, "freebase": 2}
"""The longest metapath of each graph."""


def _graph(network: Network) -> GraphRunConfig:
    """A network over the whole graph, all training nodes in every step."""
    return GraphRunConfig(
        loop=LoopConfig(steps=150, batch=1, eval_every=10, checkpoint_every=150, keep_checkpoints=1),
        data=GraphDataConfig(),
        model=GraphModelConfig(
            network=network,
            num_layers=2,
            d_model=64,
            num_heads=4,
            dropout=0.5,
            input_dropout=0.5,
            mechanism=FullConfig(),
        ),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=10, weight_decay=0.1),
    )


def _tokens(dataset: str, mechanism: Mechanism) -> GraphRunConfig:
    """A transformer over the token lists of the nodes."""
    return _graph("tokens").changed(
        loop={"steps": 200, "batch": 128, "eval_every": 20, "checkpoint_every": 200},
        data={"metapath_length": _METAPATHS[dataset]},
        model={"d_ff": 128, "mechanism": mechanism},
        optimizer={"learning_rate": 1e-3, "warmup_steps": 20},
    )


def _set(mechanism: Mechanism) -> GraphRunConfig:
    """A transformer over all nodes at once."""
    return _graph("nodes").changed(model={"mechanism": mechanism, "d_ff": 128})


_SET: dict[str, Mechanism] = {"full": FullConfig()} | {
    f"{name}{suffix}": mechanism
    for size, suffix in ((8, "-8"), (16, "-16"), (32, ""))
    for name, mechanism in (
        ("brl", BRLConfig(window=size, num_compressed=size, block_size=None, beta=0.5)),
        ("local", LocalConfig(window=size)),
    )
}
"""w = m of BRL-Attention's table 5; the largest has no number."""


def _presets() -> dict[str, GraphRunConfig]:
    found: dict[str, GraphRunConfig] = {}
    for dataset in _METAPATHS:
        found |= {f"{dataset}-{name}": _tokens(dataset, mechanism) for name, mechanism in _ATTENTION.items()}
        found |= {f"{dataset}-{network}": _graph(network) for network in _MESSAGES}
        found[f"{dataset}-gcn"] = _graph("gcn").changed(model={"num_layers": 4 if dataset == "imdb" else 3})
        # All neighbours along a metapath are up to half of the nodes.
        data = {"metapath_length": 4 if dataset == "dblp" else 2, "neighbours": 32}
        found[f"{dataset}-han"] = _graph("han").changed(data=data, model={"num_layers": 1})
    for dataset in ("20news", "images"):
        # Dropping half of the features' entries costs an MLP on 20News four points on the validation nodes.
        all_inputs = {"input_dropout": 0.0}
        for name, mechanism in _SET.items():
            found[f"{dataset}-{name}"] = _set(mechanism).changed(model=all_inputs)
        compared: tuple[Network, ...] = ("mlp", "gcn", "gat", "nodeformer")
        for network in compared:
            nearest = {"nearest": 0 if network == "mlp" else 10}
            found[f"{dataset}-{network}"] = _graph(network).changed(data=nearest, model=all_inputs)
        # The settings of its authors' script for 20News, except for the width of a head.
        found[f"{dataset}-nodeformer"] = found[f"{dataset}-nodeformer"].changed(
            loop={"steps": 200, "checkpoint_every": 200},
            model={"dropout": 0.0},
            optimizer={"learning_rate": 1e-3},
        )
    return found


PRESETS: dict[str, GraphRunConfig] = _presets()

EDGE_LOSS = 1.0
"""The weight of NodeFormer's loss on edges, the mean over its layers, in training."""


class GraphData(NamedTuple):
    """A graph, and what makes the rows of a run of it."""

    graph: Graph
    source: Source


def _shapes(config: GraphConfig, rows: int, targets: int, edges: int) -> dict[str, Any]:
    """The arrays of a batch."""
    tokens = len(config.kinds)
    floats = {"features": (rows, tokens, config.num_features), "weights": (rows, targets)}
    classes = (config.num_classes,) if config.multi_label else ()
    integers: dict[str, Any] = {"present": (rows, tokens), "targets": (rows, targets, *classes)}
    if config.network != "tokens":
        integers["places"] = (rows, targets)
    if config.has_edges:
        integers |= {"edges": (rows, edges, 2), "relations": (rows, edges)}
    return shapes(integers, floats)


def _targets_of_row(config: GraphRunConfig, graph: Graph) -> int:
    """The training nodes of a row where the rows of a batch share all of them."""
    return -(-len(graph.splits["train"][0]) // config.loop.batch)


def apply_to(
    model: NodeClassifier, params: Any, batch: Arrays, key: Array | None = None, **options: Any
) -> Any:
    """The logits (B, P, C) of a batch; without dropout if key is None."""
    return outputs(model, params, key, batch["features"], batch["present"], **_links(batch), **options)


def _links(batch: Arrays) -> dict[str, Any]:
    return {name: batch[name] for name in ("places", "edges", "relations") if name in batch}


def graph_objective(model: NodeClassifier, z_loss: float = 0.0) -> Objective:
    """Cross-entropy and accuracy of the nodes' classes. Where nodes may have several, the mean over the classes of
    their binary cross-entropy, and the mean over the nodes of their own F1 scores. The accuracy or this score selects
    the checkpoint: the loss rises again while they still get better. In training, a network's loss on edges is added.
    """
    config = model.config
    if config.multi_label and z_loss:
        raise ValueError(f"z_loss must be 0 where nodes may have several classes, got {z_loss}")
    score = "node_f1" if config.multi_label else "accuracy"

    def init(key: Array) -> Any:
        batch = {name: jnp.zeros(x.shape, x.dtype) for name, x in _shapes(config, 1, 1, 1).items()}
        return model.init(key, batch["features"], batch["present"], **_links(batch))["params"]

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
    network = NodeClassifier
    following = ("eval.graph --workdir {run}",)

    def sized(self, config: GraphRunConfig, data: GraphData | None = None) -> GraphRunConfig:
        """Sets the kinds of tokens and nodes, and the classes, from the graph; keeps the defaults if none was read."""
        row_targets = 1 if config.model.network == "tokens" else config.data.row_targets
        if data is None:
            return config.changed(data={"row_targets": max(row_targets, 1)})
        graph = data.graph
        row_targets = row_targets or _targets_of_row(config, graph)
        sizes = {
            "kinds": data.source.kinds,
            "num_features": graph.features[0].shape[1],
            "num_relations": max(len(graph.relations), 1),
            "num_classes": graph.num_classes,
            "multi_label": graph.is_multi_label,
        }
        return config.changed(model=sizes, data={"row_targets": row_targets})

    def objective(self, model: NodeClassifier, config: GraphRunConfig) -> Objective:
        return graph_objective(model, config.z_loss)

    def batch_shapes(self, config: GraphRunConfig, rows: int) -> dict[str, Any]:
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

    def training_batches(self, config: GraphRunConfig, data: GraphData, **options: Any) -> NodeBatches:
        return self._batches(NodeBatches, config, data, "train", digest=data.graph.digest, **options)

    def held_out_batches(
        self, config: GraphRunConfig, data: GraphData, split: str, **options: Any
    ) -> HeldOutNodes:
        return self._batches(HeldOutNodes, config, data, split, **options)

    def _batches(self, kind: Any, config: GraphRunConfig, data: GraphData, split: str, **options: Any) -> Any:
        options |= {"targets": config.data.row_targets, "has_edges": config.model.has_edges}
        return kind(data.source, *data.graph.splits[split], **options)

    def predict(
        self, config: GraphRunConfig, model: NodeClassifier, params: Any, data: GraphData, split: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """The predicted and the true classes of a split's nodes, (N,), or (N, C) zeros and ones, in one order."""

        @jax.jit
        def run(params: Any, batch: Arrays) -> Any:
            logits = apply_to(model, params, batch)
            return (logits > 0).astype(jnp.int32) if config.model.multi_label else logits.argmax(axis=-1)

        return self.predictions(config, data, split, lambda batch: run(params, batch.arrays))


GRAPH = GraphTask()
