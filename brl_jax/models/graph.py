"""Node classification: transformers over a node's tokens or over all nodes, and the graph networks to compare with."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from brl_jax.fields import Range, Width
from brl_jax.layers.core.modules import dense, norm, parameter
from brl_jax.layers.core.protocol import Dimensions
from brl_jax.models.config import StackConfig, check_config
from brl_jax.models.graph_layers import (
    GATLayer,
    GCNLayer,
    HANLayer,
    HGTLayer,
    NodeFormerLayer,
    RGCNLayer,
    add_loops,
    by_kind,
)
from brl_jax.models.networks import make_stack

Network = Literal["tokens", "nodes", "mlp", "gcn", "rgcn", "gat", "simple_hgn", "hgt", "han", "nodeformer"]

SIMPLE_HGN_BETA = 0.05
"""How much of the previous layer's attention Simple-HGN keeps (Lv et al. 2021, arXiv:2112.14936)."""


@dataclasses.dataclass(frozen=True)
class GraphConfig(StackConfig):
    """Sizes and options of a network that classifies nodes.

    config = GraphConfig(network="gcn", num_features=1433, num_classes=7)
    model = NodeClassifier(config)
    """

    is_causal: ClassVar[bool] = False
    positions: ClassVar[Literal["none"]] = "none"  # tokens form a set

    network: Network = "tokens"
    """What is classified, and how: one node by attention over its list of tokens ("tokens"); all nodes of a graph by
    attention among them, without edges ("nodes"); or all nodes by a network without attention ("mlp") or by one that
    passes messages along the edges ("gcn", "rgcn", "gat", "simple_hgn", "hgt", "han", whose edges are metapaths, or
    "nodeformer", whose nodes also attend to all others)."""
    identities: bool = False
    """Whether each node of the graph has a learned vector, and its features are not read."""
    input_dropout: Annotated[float, Range(0, below=1)] = 0.0
    """Dropout rate of the features."""
    kinds: tuple[int, ...] = (0,)
    """The kind of each token of a list, or of each node of the graph; tokens of one kind share a projection."""
    num_features: Width = 1
    """Numbers in each token's or node's feature vector."""
    num_relations: Width = 1
    """Kinds of edges."""
    num_classes: Annotated[int, Range(2, 2**20)] = 2
    """Number of classes."""
    multi_label: bool = False
    """Whether a node may belong to several classes."""

    def __post_init__(self):
        super().__post_init__()
        if not self.kinds or min(self.kinds) < 0:
            raise ValueError("kinds must not be empty or negative")
        if self.identities and self.network == "tokens":
            raise ValueError(
                "identities must be False with network 'tokens', whose tokens are means of nodes"
            )

    @property
    def has_edges(self) -> bool:
        """Whether the network reads edges."""
        return self.network not in ("tokens", "nodes", "mlp")


def first_present(present: Bool[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B"]]:
    """Returns an order of each row's tokens that puts those present first and is otherwise stable, and their number, at
    least 1."""
    order = jnp.argsort(~present, axis=1, stable=True)
    return order, jnp.maximum(present.sum(axis=1), 1)


def kind_means(
    x: Float[Array, "B T D"], present: Bool[Array, "B T"], kinds: tuple[int, ...]
) -> Float[Array, "B K D"]:
    """Returns the mean of each kind's present tokens; zeros for a kind without any."""
    member = np.asarray(kinds)[None] == np.arange(max(kinds) + 1)[:, None]
    there = (present[:, None] & member[None]).astype(x.dtype)
    total = jnp.einsum("bkt,btd->bkd", there, jnp.where(present[..., None], x, 0.0))
    return total / jnp.maximum(there.sum(axis=-1, keepdims=True), 1.0)


class Projection(nn.Module):
    """Features (B, T, F) to rows (B, T, D): a linear map and a bias for each kind, or a learned vector for each node; a
    norm, and a ReLU."""

    config: GraphConfig
    dimensions: Dimensions

    @nn.compact
    def __call__(self, features: Float[Array, "B T F"], deterministic: bool) -> Float[Array, "B T D"]:
        c, d = self.config, self.dimensions
        number, width = max(c.kinds) + 1, d.d_model
        if c.identities:
            shape = (len(c.kinds), width)
            # Small, so that what the nodes learn soon exceeds where they start.
            table = parameter(self, "nodes", nn.initializers.normal(0.01), shape, (None, "embed"))
            x = jnp.broadcast_to(table.astype(d.dtype)[None], (features.shape[0], *shape))
        else:
            x = nn.Dropout(c.input_dropout)(features.astype(d.dtype), deterministic=deterministic)
            init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
            axes = (None, "inputs", "embed")
            kernel = parameter(self, "kernel", init, (number, c.num_features, width), axes).astype(d.dtype)
            bias = parameter(self, "bias", nn.initializers.normal(0.1), (number, width), (None, "embed"))
            x = by_kind(x, kernel, c.kinds) + bias.astype(d.dtype)[np.asarray(c.kinds)][None]
        x = jax.nn.relu(norm(d, name="norm")(x))
        return nn.Dropout(c.dropout)(x, deterministic=deterministic)


class SetEncoder(nn.Module):
    """A stack of blocks over sets, (B, T, D) -> (B, T, D). Tokens outside `present` (B, T) are ignored wherever they
    are, and their outputs are meaningless."""

    config: GraphConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], present: Bool[Array, "B T"], deterministic: bool
    ) -> Float[Array, "B T D"]:
        c = self.config
        order, lengths = first_present(present)
        stack = make_stack(c.mechanisms, c.dimensions, c.remat, name="stack")
        sorted_x = jnp.take_along_axis(jnp.where(present[..., None], x, 0.0), order[..., None], axis=1)
        y, _ = stack(sorted_x, lengths=lengths, deterministic=deterministic)
        return jnp.take_along_axis(y, jnp.argsort(order, axis=1)[..., None], axis=1)


class MessagePassing(nn.Module):
    """The layers of a network without attention, or of one that passes messages, over one graph: (n, D) -> (n, D).

    The layers of "nodeformer" sow their loss on edges into the collection "losses".
    """

    config: GraphConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "n D"],
        present: Bool[Array, "n"],
        edges: Int[Array, "E 2"],
        relations: Int[Array, "E"],
        deterministic: bool,
    ) -> Float[Array, "n D"]:
        c, d = self.config, self.config.dimensions
        drop = nn.Dropout(c.dropout, deterministic=deterministic)
        heads, width = d.num_heads, d.d_model // d.num_heads
        if c.network in ("gat", "simple_hgn"):
            edges, relations = add_loops(edges, relations, x.shape[0], c.num_relations)
        weights = None
        for layer in range(c.num_layers):
            name = f"layer_{layer}"
            # The projection drops out the first layer's inputs, and the classifier the last one's outputs.
            x = drop(x) if layer else x
            if c.network == "mlp":
                x = jax.nn.relu(dense(d, d.d_model, ("embed", "outputs"), name=name, use_bias=True)(x))
            elif c.network == "gcn":
                x = jax.nn.relu(GCNLayer(d, d.d_model, name=name)(x, edges))
            elif c.network == "rgcn":
                x = jax.nn.relu(RGCNLayer(d, d.d_model, c.num_relations, name=name)(x, edges, relations))
            elif c.network == "hgt":
                x = HGTLayer(d, c.kinds, c.num_relations, name=name)(x, edges, relations)
            elif c.network == "han":
                x = HANLayer(d, c.num_relations, name=name)(x, edges, relations)
            elif c.network == "nodeformer":
                y, loss = NodeFormerLayer(d, name=name)(x, present, edges, deterministic)
                x = norm(d, name=f"norm_{layer}")(x + y)
                if not self.is_initializing():
                    self.sow("losses", f"edges_{layer}", loss)
            else:
                is_hgn = c.network == "simple_hgn"
                attend = GATLayer(
                    d,
                    heads,
                    width,
                    relations=c.num_relations + 1 if is_hgn else 0,
                    beta=SIMPLE_HGN_BETA,
                    dropout=c.dropout,
                    name=name,
                )
                y, weights = attend(x, edges, relations, weights if is_hgn else None, deterministic)
                y = y.reshape(-1, d.d_model)
                if is_hgn:
                    y = y + dense(
                        d, d.d_model, ("embed", "outputs"), name=f"residual_{layer}", use_bias=False
                    )(x)
                x = jax.nn.elu(y)
        return x


class NodeClassifier(nn.Module):
    """Float32 logits (B, P, C) of nodes.

    Args of the call:
      features: (B, T, F), the tokens of a node's list (network "tokens") or the nodes of a graph.
      present: (B, T) bools or ints, which of them exist. The first token of a list is the node itself and must exist.
      places: (B, P) ints, the nodes to classify; None with network "tokens", which has P = 1.
      edges, relations: (B, E, 2) and (B, E) ints of the graph, see `graph_layers`; None for networks without edges.
      deterministic: False applies dropout, with the random stream "dropout".

    Raises:
      ValueError: the shape of features does not match the configuration's kinds and num_features.
    """

    config: GraphConfig

    @nn.compact
    def __call__(
        self,
        features: Float[Array, "B T F"],
        present: Array,
        *,
        places: Int[Array, "B P"] | None = None,
        edges: Int[Array, "B E 2"] | None = None,
        relations: Int[Array, "B E"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B P C"]:
        check_config(self.config, GraphConfig)
        c, d = self.config, self.config.dimensions
        if features.shape[1:] != (len(c.kinds), c.num_features):
            raise ValueError(
                f"features must have shape (batch, {len(c.kinds)}, {c.num_features}), got {features.shape}"
            )
        present = present.astype(bool)
        # Absent features may be NaN, which would reach the gradient of the projection.
        features = jnp.where(present[..., None], features, jnp.zeros((), features.dtype))
        x = Projection(c, d, name="projection")(features, deterministic)
        if c.network in ("tokens", "nodes"):
            x = SetEncoder(c, name="encoder")(x, present, deterministic)
        else:
            if edges is None or relations is None:
                edges = jnp.zeros((*x.shape[:1], 0, 2), jnp.int32)
                relations = jnp.zeros((*x.shape[:1], 0), jnp.int32)
            over_rows = nn.vmap(
                MessagePassing,
                in_axes=(0, 0, 0, 0, None),
                variable_axes={"params": None, "losses": 0},
                split_rngs={"params": False, "dropout": True},
            )
            x = over_rows(c, name="layers")(x, present, edges, relations, deterministic)
        if c.network == "tokens":
            x = kind_means(x, present, c.kinds).reshape(x.shape[0], 1, -1)
        else:
            assert places is not None
            x = jnp.take_along_axis(x, places[..., None], axis=1)
        x = nn.Dropout(c.dropout)(x, deterministic=deterministic)
        logits: Any = dense(d, c.num_classes, ("embed", "classes"), name="out", use_bias=True)(x)
        logits = logits.astype(jnp.float32)
        if c.network == "simple_hgn":  # normalised to the unit sphere, as in its paper
            logits = logits * jax.lax.rsqrt(jnp.sum(logits**2, axis=-1, keepdims=True) + 1e-12)
        return logits
