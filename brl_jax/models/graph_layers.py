"""Layers over sparse neighbourhoods: sums and softmaxes over the edges that end in a node, as segment sums.

A graph is `edges` (E, 2) ints, the sender and the receiver of each edge, and `relations` (E,) ints, its kind. An edge
whose receiver is the number of nodes does not exist: padding gives a graph a fixed size. Edges that are sorted by their
receiver are summed faster.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.layers.core.modules import dense, parameter
from brl_jax.layers.core.protocol import Dimensions


def add_loops(
    edges: Int[Array, "E 2"], relations: Int[Array, "E"], nodes: int, relation: int
) -> tuple[Int[Array, "F 2"], Int[Array, "F"]]:
    """The edges and one from each node to itself, whose kind is `relation`."""
    own = jnp.arange(nodes, dtype=edges.dtype)
    loops = jnp.stack([own, own], axis=-1)
    kinds = jnp.full(nodes, relation, relations.dtype)
    return jnp.concatenate([edges, loops]), jnp.concatenate([relations, kinds])


def sum_at(values: Float[Array, "E *D"], receivers: Int[Array, "E"], nodes: int) -> Float[Array, "n *D"]:
    """The sum of the edges' values at each receiver; edges that do not exist are left out."""
    return jax.ops.segment_sum(values, receivers, num_segments=nodes)


def softmax_at(scores: Float[Array, "E N"], receivers: Int[Array, "E"], nodes: int) -> Float[Array, "E N"]:
    """The softmax over the edges that end in one node; edges that do not exist get weights without meaning."""
    highest = jax.lax.stop_gradient(jax.ops.segment_max(scores, receivers, num_segments=nodes))
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    shares = jnp.exp(jnp.minimum(scores - highest.at[receivers].get(mode="clip"), 0.0))
    total = sum_at(shares, receivers, nodes)
    return shares / jnp.maximum(total.at[receivers].get(mode="clip"), jnp.finfo(shares.dtype).tiny)


class GCNLayer(nn.Module):
    """D^-1/2 (A + I) D^-1/2 X W + b (Kipf & Welling 2016, arXiv:1609.02907, eq. 2), where A has one entry for each edge
    and D is the degree of a node among those that it receives from, itself included.

    The edges of an undirected graph go both ways; A is then symmetric, as in the paper.
    """

    dimensions: Dimensions
    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "n I"], edges: Int[Array, "E 2"]) -> Float[Array, "n O"]:
        nodes = x.shape[0]
        senders, receivers = edges[:, 0], edges[:, 1]
        degree = 1.0 + sum_at(jnp.ones(edges.shape[0], x.dtype), receivers, nodes)
        scale = jax.lax.rsqrt(degree)[:, None]
        # The narrower of the two widths crosses the edges.
        project = dense(self.dimensions, self.features, ("embed", "outputs"), name="kernel", use_bias=False)
        before = self.features < x.shape[1]
        if before:
            x = project(x)
        scaled = x * scale
        x = (sum_at(scaled[senders], receivers, nodes) + scaled) * scale
        if not before:
            x = project(x)
        bias = parameter(self, "bias", nn.initializers.zeros_init(), (self.features,), ("outputs",))
        return x + bias[None]


class GATLayer(nn.Module):
    """Attention of a node to those that it receives from and itself, (n, I) -> (n, N, O).

    With W x_i the projected nodes, the score of an edge from j to i is LeakyReLU(a . W x_i + b . W x_j), of slope 0.2
    (Velickovic et al. 2018, arXiv:1710.10903, eq. 3). With `relations`, the number of edges' kinds (the loops' among
    them), the score has a third term c . V r, where r is a vector learned for each kind (Lv et al. 2021,
    arXiv:2112.14936: Simple-HGN). `earlier` (E, N) are the weights of the layer before, of which this layer's
    take the share `beta`.

    Args of the call:
      edges, relations: with the nodes' loops (`add_loops`). deterministic: False drops weights at the rate `dropout`.

    Returns:
      The outputs, and the weights (E, N).
    """

    dimensions: Dimensions
    heads: int
    features: int
    relations: int = 0
    beta: float = 0.0
    slope: float = 0.2
    dropout: float = 0.0

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "n I"],
        edges: Int[Array, "E 2"],
        relations: Int[Array, "E"],
        earlier: Float[Array, "E N"] | None = None,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "n N O"], Float[Array, "E N"]]:
        nodes, d, shape = x.shape[0], self.dimensions, (self.heads, self.features)
        axes = ("heads", "head_dim")
        projected: Any = dense(d, shape, ("embed", *axes), name="kernel", use_bias=False)(x)
        unit = nn.initializers.normal(self.features**-0.5)
        to_receiver = parameter(self, "receiver", unit, shape, axes)
        to_sender = parameter(self, "sender", unit, shape, axes)
        senders, receivers = edges[:, 0], edges[:, 1]
        own = jnp.einsum("nhf,hf->nh", projected, to_receiver)
        others = jnp.einsum("nhf,hf->nh", projected, to_sender)
        scores = own.at[receivers].get(mode="clip") + others[senders]
        if self.relations:
            table = parameter(self, "relation", unit, (self.relations, *shape), (None, *axes))
            kinds = jnp.einsum("rhf,hf->rh", table, parameter(self, "relation_score", unit, shape, axes))
            scores = scores + kinds[relations]
        weights = softmax_at(jax.nn.leaky_relu(scores, self.slope), receivers, nodes)
        if earlier is not None:
            weights = (1.0 - self.beta) * weights + self.beta * earlier
        kept = nn.Dropout(self.dropout)(weights, deterministic=deterministic)
        return sum_at(kept[..., None] * projected[senders], receivers, nodes), weights
