"""The configuration of a run on graphs, and its presets: DATASET-NETWORK.

acm, dblp, imdb, aminer, freebase   the Heterogeneous Graph Benchmark's format (BRL-Attention's tables 4 and 10)
20news, images                      nodes without a graph (tables 5 and 9); -gcn and -gat use nearest neighbours
-brl, -local, -full                 transformers over token lists, or over all nodes if there are no links
-mlp, -gcn, -rgcn, -gat,            what they are compared with
-simple_hgn, -hgt, -han, -nodeformer
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

from brl_jax.layers import BRLConfig, FullConfig, LocalConfig, Mechanism
from brl_jax.models.graph import GraphConfig, Network
from train.data.graphs.load import GraphDataConfig
from train.engine.config import LoopConfig, RunConfig
from train.engine.fields import Decided, Flat
from train.engine.optimizer import OptimizerConfig


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
        """See `train.cli.options.parse_options`."""
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


def _tokens(dataset: str, mechanism: Mechanism) -> GraphRunConfig:
    """A transformer over the token lists of the nodes."""
    return GraphRunConfig(
        loop=LoopConfig(steps=200, batch=128, eval_every=20, checkpoint_every=200, keep_checkpoints=1),
        data=GraphDataConfig(metapath_length=_METAPATHS[dataset]),
        model=GraphModelConfig(
            network="tokens",
            num_layers=2,
            d_model=64,
            num_heads=4,
            d_ff=128,
            dropout=0.5,
            input_dropout=0.5,
            mechanism=mechanism,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=20, weight_decay=0.1),
    )


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


def _set(mechanism: Mechanism) -> GraphRunConfig:
    """A transformer over all nodes at once."""
    found = _graph("nodes")
    model = dataclasses.replace(found.model, mechanism=mechanism, d_ff=128)
    return dataclasses.replace(found, model=model)


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
        # All neighbours along a metapath are up to half of the nodes.
        data = GraphDataConfig(metapath_length=4 if dataset == "dblp" else 2, neighbours=32)
        han = found[f"{dataset}-han"]
        model = dataclasses.replace(han.model, num_layers=1)
        found[f"{dataset}-han"] = dataclasses.replace(han, data=data, model=model)
    for dataset in ("20news", "images"):
        found |= {f"{dataset}-{name}": _set(mechanism) for name, mechanism in _SET.items()}
        for name in ("mlp", "gcn", "gat", "nodeformer"):
            config = _graph(name)
            data = dataclasses.replace(config.data, nearest=0 if name == "mlp" else 10)
            found[f"{dataset}-{name}"] = dataclasses.replace(config, data=data)
        for name in (*_SET, "mlp", "gcn", "gat", "nodeformer"):
            config = found[f"{dataset}-{name}"]
            # Of an MLP on 20News half of the features' entries dropped cost four points on the validation nodes.
            model = dataclasses.replace(config.model, input_dropout=0.0)
            found[f"{dataset}-{name}"] = dataclasses.replace(config, model=model)
        # The settings of its authors' script for 20News, but for the width of a head.
        config = found[f"{dataset}-nodeformer"]
        found[f"{dataset}-nodeformer"] = dataclasses.replace(
            config,
            loop=dataclasses.replace(config.loop, steps=200, checkpoint_every=200),
            model=dataclasses.replace(config.model, dropout=0.0),
            optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-3),
        )
    return found


PRESETS: dict[str, GraphRunConfig] = _presets()
