"""Graph layers: sums and softmaxes over the edges that end in each node, computed as segment sums.

A graph is `edges` (E, 2) ints, the sender and the receiver of each edge, and `relations` (E,) ints, the kind of each
edge. Edges whose receiver equals the number of nodes are padding, which gives graphs a fixed size. Sums are faster if
edges are sorted by receiver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.by_platform import Form, by_platform
from brl_jax.attention.core.scores import accumulation_dtype
from brl_jax.attention.recurrent.performer import performer_projection
from brl_jax.layers.core.modules import dense, parameter
from brl_jax.layers.core.protocol import Dimensions


def add_loops(
    edges: Int[Array, "E 2"], relations: Int[Array, "E"], nodes: int, relation: int
) -> tuple[Int[Array, "F 2"], Int[Array, "F"]]:
    """Returns the edges followed by a loop of kind `relation` at each node."""
    own = jnp.arange(nodes, dtype=edges.dtype)
    loops = jnp.stack([own, own], axis=-1)
    kinds = jnp.full(nodes, relation, relations.dtype)
    return jnp.concatenate([edges, loops]), jnp.concatenate([relations, kinds])


def sum_at(values: Float[Array, "E *D"], receivers: Int[Array, "E"], nodes: int) -> Float[Array, "n *D"]:
    """Returns the sum of the edges' values at each receiver, without padding edges. 16-bit values are accumulated in
    float32."""
    exact = values.astype(accumulation_dtype(values.dtype))
    return jax.ops.segment_sum(exact, receivers, num_segments=nodes).astype(values.dtype)


# Added to NodeFormer's features, the largest of which is 1, as in its authors' release.
_MIN_FEATURE = 1e-6

EDGES_OF_BLOCK = 8192
"""Edges per block on a CPU: with 64 numbers each, their messages take two megabytes and stay in its caches."""


def sum_of_messages(
    x: Float[Array, "n N O"], weights: Float[Array, "E N"], edges: Int[Array, "E 2"]
) -> Float[Array, "n N O"]:
    """Returns, for each receiver, the sum of its senders' rows times the edges' weights, without padding edges.

    The messages (E, N, O) are the largest arrays of a graph network. A CPU computes them in blocks, and no backend
    keeps them for the backward pass.
    """
    return by_platform(
        lambda platform, *_: _IN_BLOCKS if platform == "cpu" else _AT_ONCE,
        x,
        weights,
        edges,
        results=jax.ShapeDtypeStruct(x.shape, x.dtype),
        plain=_sum_at_once,
    )


def _sum_at_once(x: Array, weights: Array, edges: Array) -> Array:
    return sum_at(weights[..., None] * x[edges[:, 0]], edges[:, 1], x.shape[0])


def _in_blocks(edges: Array, weights: Array, nodes: int) -> tuple[Array, Array]:
    """Returns edges (blocks, block, 2) and weights (blocks, block, N); padding edges fill the last block."""
    size = min(EDGES_OF_BLOCK, max(edges.shape[0], 1))
    blocks = -(-edges.shape[0] // size)
    missing = blocks * size - edges.shape[0]
    edges = jnp.pad(edges, ((0, missing), (0, 0)), constant_values=nodes)
    weights = jnp.pad(weights, ((0, missing), (0, 0)))
    return edges.reshape(blocks, size, 2), weights.reshape(blocks, size, weights.shape[1])


def _sum_in_blocks(x: Array, weights: Array, edges: Array) -> Array:
    def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
        ends, weight = block
        messages = weight[..., None] * x.at[ends[:, 0]].get(mode="clip")
        return total.at[ends[:, 1]].add(messages.astype(total.dtype)), None

    zeros = jnp.zeros_like(x, accumulation_dtype(x.dtype))
    return lax.scan(add, zeros, _in_blocks(edges, weights, x.shape[0]))[0].astype(x.dtype)


def _gradients_at_once(x: Array, weights: Array, edges: Array, d_sum: Array) -> tuple[Array, Array]:
    """Returns the gradients of x and the weights."""
    senders, receivers = edges[:, 0], edges[:, 1]
    d_messages = d_sum.at[receivers].get(mode="fill", fill_value=0)
    d_x = sum_at(weights[..., None] * d_messages, senders, x.shape[0])
    return d_x, jnp.sum(x[senders] * d_messages, axis=-1)


def _gradients_in_blocks(x: Array, weights: Array, edges: Array, d_sum: Array) -> tuple[Array, Array]:
    heads, features = x.shape[1:]
    # On a CPU, XLA's sum over such a short last axis takes several times longer than this product.
    sums = jnp.repeat(jnp.eye(heads, dtype=x.dtype), features, axis=0)

    def add(d_x: Array, block: tuple[Array, Array]) -> tuple[Array, Array]:
        ends, weight = block
        d_messages = d_sum.at[ends[:, 1]].get(mode="fill", fill_value=0)
        products = x.at[ends[:, 0]].get(mode="clip") * d_messages
        d_weight = products.reshape(-1, heads * features) @ sums
        return d_x.at[ends[:, 0]].add((weight[..., None] * d_messages).astype(d_x.dtype)), d_weight

    zeros = jnp.zeros_like(x, accumulation_dtype(x.dtype))
    d_x, d_weights = lax.scan(add, zeros, _in_blocks(edges, weights, x.shape[0]))
    return d_x.astype(x.dtype), d_weights.reshape(-1, weights.shape[1])[: weights.shape[0]]


def _form(run: Callable[..., Array], gradients: Callable[..., tuple[Array, Array]]) -> Form:
    def gradient(operands: Any, result: Array, kept: Any, d_sum: Array) -> tuple[Array, Array, None]:
        return *gradients(*operands, d_sum), None

    return Form(lambda *operands: (run(*operands), ()), gradient)


_IN_BLOCKS = _form(_sum_in_blocks, _gradients_in_blocks)
_AT_ONCE = _form(_sum_at_once, _gradients_at_once)


def softmax_at(scores: Float[Array, "E N"], receivers: Int[Array, "E"], nodes: int) -> Float[Array, "E N"]:
    """Returns the softmax over the edges that end in the same node, in float32 for 16-bit types; the weights of padding
    edges are meaningless."""
    dtype = scores.dtype
    scores = scores.astype(accumulation_dtype(dtype))
    highest = jax.lax.stop_gradient(jax.ops.segment_max(scores, receivers, num_segments=nodes))
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    shares = jnp.exp(jnp.minimum(scores - highest.at[receivers].get(mode="clip"), 0.0))
    total = sum_at(shares, receivers, nodes)
    weights = shares / jnp.maximum(total.at[receivers].get(mode="clip"), jnp.finfo(shares.dtype).tiny)
    return weights.astype(dtype)


class GCNLayer(nn.Module):
    """D^-1/2 (A + I) D^-1/2 X W + b (Kipf & Welling 2016, arXiv:1609.02907, eq. 2). A has one entry for each edge, and
    D counts the edges that a node receives, including its loop.

    An undirected graph lists each edge in both directions, which makes A symmetric as in the paper.
    """

    dimensions: Dimensions
    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "n I"], edges: Int[Array, "E 2"]) -> Float[Array, "n O"]:
        nodes = x.shape[0]
        receivers = edges[:, 1]
        degree = 1.0 + sum_at(jnp.ones(edges.shape[0], accumulation_dtype(x.dtype)), receivers, nodes)
        scale = jax.lax.rsqrt(degree)[:, None].astype(x.dtype)
        # Send the narrower of the two widths along the edges.
        project = dense(self.dimensions, self.features, ("embed", "outputs"), name="kernel", use_bias=False)
        before = self.features < x.shape[1]
        if before:
            x = project(x)
        scaled = x * scale
        ones = jnp.ones((edges.shape[0], 1), x.dtype)
        x = (sum_of_messages(scaled[:, None], ones, edges)[:, 0] + scaled) * scale
        if not before:
            x = project(x)
        bias = parameter(self, "bias", nn.initializers.zeros_init(), (self.features,), ("outputs",))
        return x + bias.astype(x.dtype)[None]


def _from_kinds(edges: Array, relations: Array, count: int) -> Array:
    """Returns the edges with the sender's row among rows that each node has for each of `count` kinds of edges."""
    return jnp.stack([edges[:, 0] * count + relations, edges[:, 1]], axis=-1)


class RGCNLayer(nn.Module):
    """W x_i + b, plus for each kind r of edges the mean of W_r x_j over the edges of this kind that node i receives
    (Schlichtkrull et al. 2017, arXiv:1703.06103, eq. 2, with a matrix for each kind)."""

    dimensions: Dimensions
    features: int
    relations: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "n I"], edges: Int[Array, "E 2"], relations: Int[Array, "E"]
    ) -> Float[Array, "n O"]:
        nodes, kinds, d = x.shape[0], self.relations, self.dimensions
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
        shape = (kinds, x.shape[1], self.features)
        kernel = parameter(self, "kernel", init, shape, (None, "embed", "outputs")).astype(x.dtype)
        rows = jnp.einsum("ni,rio->nro", x, kernel).reshape(nodes * kinds, 1, self.features)
        groups = edges[:, 1] * kinds + relations
        count = sum_at(jnp.ones(edges.shape[0], x.dtype), groups, (nodes + 1) * kinds)
        means = sum_of_messages(rows, (1.0 / count[groups])[:, None], _from_kinds(edges, relations, kinds))
        own = dense(d, self.features, ("embed", "outputs"), name="own", use_bias=True)(x)
        return own + means[:nodes, 0]


def by_kind(
    x: Float[Array, "*B n I"], kernel: Float[Array, "K I O"], kinds: tuple[int, ...]
) -> Float[Array, "*B n O"]:
    """Returns each row times the matrix of its kind: one product for each run of equal kinds, in which a graph's nodes
    are sorted."""
    rows, start = [], 0
    for end in range(1, len(kinds) + 1):
        if end == len(kinds) or kinds[end] != kinds[start]:
            rows.append(x[..., start:end, :] @ kernel[kinds[start]])
            start = end
    return jnp.concatenate(rows, axis=-2)


class HGTLayer(nn.Module):
    """Attention with queries, keys, values and outputs by the kinds of nodes, and maps of keys and values by the kinds
    of edges, (n, D) -> (n, D) (HGT, Hu et al. 2020, arXiv:2003.01332, eq. 3 to 5).

    The edge of kind r from j to i scores (K x_j) W_r . (Q x_i) p_r / sqrt(H), a softmax over all edges that i receives
    weights the messages (V x_j) M_r, and the output is x_i + A GELU(sum).
    """

    dimensions: Dimensions
    kinds: tuple[int, ...]
    relations: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "n D"], edges: Int[Array, "E 2"], relations: Int[Array, "E"]
    ) -> Float[Array, "n D"]:
        d, nodes, width, count = self.dimensions, *x.shape, self.relations
        heads, size = d.num_heads, width // d.num_heads
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))

        def typed(name: str, x: Array) -> Array:
            shape = (max(self.kinds) + 1, width, width)
            kernel = parameter(self, name, init, shape, (None, "embed", "outputs"))
            return by_kind(x, kernel.astype(x.dtype), self.kinds)

        def related(name: str, x: Array) -> Array:
            """A row for each node and kind of edges, of all heads."""
            split = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0, 1))
            shape = (count, heads, size, size)
            kernel = parameter(self, name, split, shape, (None, "heads", "head_dim", None)).astype(x.dtype)
            rows = jnp.einsum("nhf,rhfg->nrhg", x.reshape(nodes, heads, size), kernel)
            return rows.reshape(nodes * count, heads, size)

        query = typed("query", x).reshape(nodes, heads, size)
        keys, values = related("key_map", typed("key", x)), related("value_map", typed("value", x))
        prior = parameter(self, "prior", nn.initializers.ones_init(), (count, heads), (None, "heads"))
        places = _from_kinds(edges, relations, count)
        scores = jnp.sum(query.at[edges[:, 1]].get(mode="clip") * keys[places[:, 0]], axis=-1)
        scores = scores * prior.astype(x.dtype)[relations] * jnp.asarray(size**-0.5, x.dtype)
        weights = softmax_at(scores, edges[:, 1], nodes)
        summed = sum_of_messages(values, weights, places)[:nodes].reshape(nodes, width)
        return x + typed("out", jax.nn.gelu(summed, approximate=False))


class HANLayer(nn.Module):
    """Attention along each metapath, then over the metapaths, (n, D) -> (n, D) (HAN, Wang et al. 2019,
    arXiv:1903.07293, eq. 1 to 9).

    The kinds of edges are metapaths. With projected nodes h = W x, node i reads along metapath r
    z_ir = ELU(sum_j a_ijr h_j), where a is the softmax over the edges of kind r that i receives of
    LeakyReLU(b_r . h_i + c_r . h_j), of slope 0.2. The output is sum_r s_r z_ir, where s is the softmax over the
    metapaths of the mean over all nodes of q . tanh(V z_ir + v).
    """

    dimensions: Dimensions
    metapaths: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "n D"], edges: Int[Array, "E 2"], relations: Int[Array, "E"]
    ) -> Float[Array, "n D"]:
        d, nodes, width, count = self.dimensions, *x.shape, self.metapaths
        shape, axes = (d.num_heads, width // d.num_heads), ("heads", "head_dim")
        projected: Any = dense(d, shape, ("embed", *axes), name="kernel", use_bias=False)(x)
        unit = nn.initializers.normal(shape[1] ** -0.5)

        def scored(name: str) -> Array:
            vector = parameter(self, name, unit, (count, *shape), (None, *axes)).astype(x.dtype)
            return jnp.einsum("nhf,rhf->nrh", projected, vector).reshape(nodes * count, shape[0])

        # Both ends of an edge as rows that each node has for each metapath.
        places = edges * count + relations[:, None]
        scores = scored("receiver").at[places[:, 1]].get(mode="clip") + scored("sender")[places[:, 0]]
        weights = softmax_at(jax.nn.leaky_relu(scores, 0.2), places[:, 1], nodes * count)
        read = sum_of_messages(jnp.repeat(projected, count, axis=0), weights, places)
        z = jax.nn.elu(read).reshape(nodes, count, width)
        hidden: Any = dense(d, width, ("embed", "outputs"), name="semantic", use_bias=True)(z)
        query = parameter(self, "semantic_query", nn.initializers.normal(width**-0.5), (width,), ("outputs",))
        shares = jax.nn.softmax(jnp.tanh(hidden).mean(0) @ query.astype(x.dtype))
        return jnp.einsum("nrd,r->nd", z, shares)


class GATLayer(nn.Module):
    """Attention of each node to its senders and itself, (n, I) -> (n, N, O).

    With projected nodes W x_i, the edge from j to i scores LeakyReLU(a . W x_i + b . W x_j), of slope 0.2 (Velickovic
    et al. 2018, arXiv:1710.10903, eq. 3). If `relations` gives the number of kinds of edges (loops included), the score
    has a third term c . V r with a learned vector r for each kind (Simple-HGN, Lv et al. 2021, arXiv:2112.14936).
    `earlier` (E, N) are the previous layer's weights, which enter this layer's with the share `beta`.

    Args of the call:
      edges, relations: including the nodes' loops (`add_loops`).
      deterministic: False drops weights at the rate `dropout`.

    Returns:
      The outputs, and the weights (E, N).
    """

    dimensions: Dimensions
    heads: int
    features: int
    relations: int = 0
    beta: float = 0.0
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
        exact = projected.astype(accumulation_dtype(projected.dtype))
        own = jnp.einsum("nhf,hf->nh", exact, to_receiver)
        others = jnp.einsum("nhf,hf->nh", exact, to_sender)
        scores = own.at[receivers].get(mode="clip") + others[senders]
        if self.relations:
            table = parameter(self, "relation", unit, (self.relations, *shape), (None, *axes))
            kinds = jnp.einsum("rhf,hf->rh", table, parameter(self, "relation_score", unit, shape, axes))
            scores = scores + kinds[relations]
        weights = softmax_at(jax.nn.leaky_relu(scores, 0.2), receivers, nodes)
        if earlier is not None:
            weights = (1.0 - self.beta) * weights + self.beta * earlier
        kept = nn.Dropout(self.dropout)(weights, deterministic=deterministic)
        return sum_of_messages(projected, kept.astype(projected.dtype), edges), weights


class NodeFormerLayer(nn.Module):
    """Attention of each node to all nodes at linear cost, and messages along the edges, (n, D) -> (n, D) (NodeFormer,
    Wu et al. 2022, arXiv:2306.08385).

    Performer's features estimate the weights of the softmax over the nodes j of q_i . k_j / (t sqrt(H)). In training,
    Gumbel noise / t is added to the logits, and the outputs are means over several samples. To each head's output comes
    D^-1/2 A D^-1/2 V times the sigmoid of a learned number.

    Args of the call:
      present: which nodes exist; the others get no weight.
      deterministic: False adds noise and draws new features, with the random stream "dropout".

    Returns:
      The outputs, and the loss on edges: minus the mean over the edges of the logarithm of their weights, without
      noise, over the number of edges of the receiver, as in the authors' release.
    """

    dimensions: Dimensions
    temperature: float = 0.25
    features: int = 30
    samples: int = 10

    @nn.compact
    def __call__(
        self, x: Float[Array, "n D"], present: Bool[Array, "n"], edges: Int[Array, "E 2"], deterministic: bool
    ) -> tuple[Float[Array, "n D"], Float[Array, ""]]:
        d, nodes = self.dimensions, x.shape[0]
        shape, axes = (d.num_heads, x.shape[1] // d.num_heads), ("embed", "heads", "head_dim")
        query, key, value = (
            dense(d, shape, axes, name=name, use_bias=True)(x) for name in ("query", "key", "value")
        )
        rng = jax.random.key(0) if deterministic else self.make_rng("dropout")
        directions = performer_projection(rng, self.features, shape[1])

        def log_features(x: Array) -> Array:
            x = x.astype(jnp.float32) * (self.temperature * shape[1] ** 0.5) ** -0.5
            return jnp.einsum("nhd,fd->nhf", x, directions) - jnp.sum(x**2, axis=-1, keepdims=True) / 2

        there = present[:, None, None]
        read, kept = log_features(query), jnp.where(there, log_features(key), -jnp.inf)
        read = jnp.exp(read - read.max(axis=-1, keepdims=True)) + _MIN_FEATURE
        kept = jnp.exp(kept - kept.max(axis=(0, 2), keepdims=True)) + jnp.where(there, _MIN_FEATURE, 0.0)
        noise = jnp.ones((nodes, d.num_heads, 1), jnp.float32)
        if not deterministic:
            noise_shape = (nodes, d.num_heads, self.samples)
            drawn = jax.random.gumbel(self.make_rng("dropout"), noise_shape, jnp.float32)
            noise = jnp.exp((drawn - drawn.max(axis=0, keepdims=True)) / self.temperature)
        total = jnp.einsum("nhf,nhs->hsf", kept, noise)
        sums = jnp.einsum("nhf,nhs,nhd->hsfd", kept, noise, value.astype(jnp.float32))
        share = 1.0 / jnp.einsum("nhf,hsf->nhs", read, total)
        attended = jnp.einsum("nhf,hsfd,nhs->nhd", read, sums, share) / noise.shape[2]

        senders, receivers = edges[:, 0], edges[:, 1]
        degree = jnp.maximum(sum_at(jnp.ones(edges.shape[0], jnp.float32), receivers, nodes), 1.0)
        own = degree.at[receivers].get(mode="clip")
        bias = parameter(self, "edge_bias", nn.initializers.zeros_init(), shape[:1], ("heads",))
        strength = jax.nn.sigmoid(bias)[None] * lax.rsqrt(own * degree[senders])[:, None]
        attended = attended.astype(x.dtype) + sum_of_messages(value, strength.astype(x.dtype), edges)
        y = dense(d, x.shape[1], ("inputs", "outputs"), name="out", use_bias=True)(attended.reshape(x.shape))

        dots = jnp.sum(read.at[receivers].get(mode="clip") * kept[senders], axis=-1)
        of_all = jnp.einsum("nhf,hf->nh", read, kept.sum(axis=0)).at[receivers].get(mode="clip")
        exists = (receivers < nodes)[:, None]
        logs = jnp.mean(jnp.log(jnp.where(exists, dots / of_all, 1.0)), axis=-1) / own
        return y, -jnp.sum(logs) / jnp.maximum(exists.sum(dtype=jnp.float32), 1.0)
