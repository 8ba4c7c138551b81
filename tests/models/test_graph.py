"""Networks over graphs: layers against dense float64 ones, padding, and sets in any order."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.recurrent.performer import performer_projection
from brl_jax.layers import BRLConfig, FullConfig
from brl_jax.models.graph import GraphConfig, MessagePassing, NodeClassifier, SetEncoder, first_present
from brl_jax.models.graph_layers import (
    GATLayer,
    GCNLayer,
    HANLayer,
    HGTLayer,
    NodeFormerLayer,
    RGCNLayer,
    add_loops,
)
from tests.support.parameters import drawn
from train.tasks.graph import EDGE_LOSS, apply_to, graph_objective

NODES, WIDTH, RELATIONS = 7, 6, 3
TINY = {"num_layers": 1, "d_model": 8, "num_heads": 2, "d_ff": 8}


def random_graph(padding):
    """(edges, relations) of a graph with some missing edges and a node that receives nothing."""
    rng = np.random.default_rng(0)
    pairs = [(i, j) for i in range(NODES) for j in range(NODES - 1) if i != j and rng.random() < 0.6]
    edges = np.array(pairs + [(2, NODES)] * padding, np.int32)
    return edges, rng.integers(RELATIONS, size=len(edges)).astype(np.int32)


def weights_of(layer, *args):
    """A layer's parameters, and all of them by name in float64."""
    return (params := drawn(layer.init, *args)["params"]), named(params)


def named(params):
    leaves = {name: leaf if isinstance(leaf, dict) else {"kernel": leaf} for name, leaf in params.items()}
    return {
        name + kind.removeprefix("kernel").replace("bias", "_bias"): np.asarray(leaf, np.float64)
        for name, each in leaves.items()
        for kind, leaf in each.items()
    }


def dense_gcn(x, edges, w):
    a = np.eye(NODES)
    for sender, receiver in edges:
        a[receiver, sender] += 1
    degree = a.sum(1)
    return (a / np.sqrt(degree[:, None] * degree[None])) @ x @ w["kernel"] + w["bias"]


def dense_rgcn(x, edges, relations, w):
    y = x @ w["own"] + w["own_bias"]
    for i in range(NODES):
        for r in range(RELATIONS):
            own = [x[s] @ w["kernel"][r] for (s, t), kind in zip(edges, relations) if t == i and kind == r]
            y[i] += np.mean(own, axis=0) if own else 0.0
    return y


def dense_hgt(x, edges, relations, w, kinds, heads):
    """A softmax over the edges of each node, one node and head after the other."""
    size = x.shape[1] // heads
    typed = {
        name: np.stack([x[i] @ w[name][kinds[i]] for i in range(NODES)]) for name in ("query", "key", "value")
    }
    y = np.zeros_like(x)
    for i in range(NODES):
        incoming = [(s, r) for (s, t), r in zip(edges, relations) if t == i]
        for h in range(heads):
            own = slice(h * size, (h + 1) * size)
            scores = [
                typed["key"][s, own]
                @ w["key_map"][r, h]
                @ typed["query"][i, own]
                * w["prior"][r, h]
                / np.sqrt(size)
                for s, r in incoming
            ]
            shares = np.exp(scores) / np.sum(np.exp(scores))
            for share, (s, r) in zip(shares, incoming):
                y[i, own] += share * (typed["value"][s, own] @ w["value_map"][r, h])
    gelu = np.vectorize(lambda z: z * (1 + math.erf(z / math.sqrt(2))) / 2)
    return x + np.stack([gelu(y[i]) @ w["out"][kinds[i]] for i in range(NODES)])


def dense_han(x, edges, relations, w, heads):
    """One node, metapath and head after the other."""
    size = x.shape[1] // heads
    h = np.einsum("ni,ihf->nhf", x, w["kernel"])
    z = np.zeros((NODES, RELATIONS, x.shape[1]))
    for i, r, k in np.ndindex(NODES, RELATIONS, heads):
        near = [s for (s, t), kind in zip(edges, relations) if t == i and kind == r]
        scores = np.array([h[i, k] @ w["receiver"][r, k] + h[s, k] @ w["sender"][r, k] for s in near])
        shares = np.exp(np.maximum(scores, 0.2 * scores))
        z[i, r, k * size : (k + 1) * size] = (
            sum(share * h[s, k] for share, s in zip(shares / shares.sum(), near)) if near else 0.0
        )
    z = np.where(z > 0, z, np.exp(np.minimum(z, 0)) - 1)
    scores = [
        np.mean(
            [
                w["semantic_query"] @ np.tanh(z[i, r] @ w["semantic"] + w["semantic_bias"])
                for i in range(NODES)
            ]
        )
        for r in range(RELATIONS)
    ]
    return np.einsum("nrd,r->nd", z, np.exp(scores) / np.sum(np.exp(scores)))


def dense_nodeformer(x, edges, w, directions, temperature):
    """(outputs, loss on edges): all weights (n, n) of one head after the other, from the features of lemma 1 of
    arXiv:2009.14794."""
    size = x.shape[1] // TINY["num_heads"]

    def features(rows, axis):
        rows = rows / np.sqrt(temperature * np.sqrt(size))
        found = np.exp(rows @ directions.T - (rows**2).sum(-1, keepdims=True) / 2)
        return found / found.max(axis, keepdims=True) + 1e-6

    a = np.zeros((NODES, NODES))
    for sender, receiver in edges:
        a[receiver, sender] += 1
    degree = np.maximum(a.sum(1), 1)
    heads, logs = [], []
    for h in range(TINY["num_heads"]):
        query, key, value = (x @ w[name][:, h] + w[name + "_bias"][h] for name in ("query", "key", "value"))
        weights = features(query, 1) @ features(key, (0, 1)).T
        weights /= weights.sum(1, keepdims=True)
        strength = 1 / (1 + np.exp(-w["edge_bias"][h]))
        heads.append(weights @ value + strength * (a / np.sqrt(degree[:, None] * degree[None])) @ value)
        logs.append((a * np.log(weights)).sum(1) / degree)
    return np.concatenate(heads, axis=1) @ w["out"] + w["out_bias"], -np.sum(np.mean(logs, axis=0)) / len(
        edges
    )


def dense_gat(x, edges, relations, w, earlier=None, beta=0.0):
    """(outputs (n, N, O), weights (n, n, N)), if no two edges join the same nodes."""
    h = np.einsum("ni,ihf->nhf", x, w["kernel"])
    kind = np.full((NODES, NODES), RELATIONS)
    there = np.eye(NODES, dtype=bool)
    for (sender, receiver), relation in zip(edges, relations):
        kind[receiver, sender], there[receiver, sender] = relation, True
    scores = (
        np.einsum("nhf,hf->nh", h, w["receiver"])[:, None] + np.einsum("nhf,hf->nh", h, w["sender"])[None]
    )
    if "relation" in w:
        scores = scores + np.einsum("rhf,hf->rh", w["relation"], w["relation_score"])[kind]
    scores = np.where(scores > 0, scores, 0.2 * scores)
    shares = np.where(there[..., None], np.exp(scores), 0.0)
    weights = shares / shares.sum(1, keepdims=True)
    if earlier is not None:
        weights = (1 - beta) * weights + beta * earlier * there[..., None]
    return np.einsum("ijh,jhf->ihf", weights, h), weights


DIMENSIONS = GraphConfig(**TINY).dimensions
KINDS, HEADS = (0,) * 4 + (1,) * 3, DIMENSIONS.num_heads
#: Layers of 8 features and the dense ones. GCN's product comes before or after its sum, by its output's width.
DENSE = {
    "gcn to 4": (GCNLayer(DIMENSIONS, 4), dense_gcn),
    "gcn to 9": (GCNLayer(DIMENSIONS, 9), dense_gcn),
    "rgcn": (RGCNLayer(DIMENSIONS, 4, RELATIONS), dense_rgcn),
    "hgt": (HGTLayer(DIMENSIONS, KINDS, RELATIONS), functools.partial(dense_hgt, kinds=KINDS, heads=HEADS)),
    "han": (HANLayer(DIMENSIONS, RELATIONS), functools.partial(dense_han, heads=HEADS)),
}


@pytest.mark.parametrize("name", DENSE)
def test_a_layer_equals_a_dense_one(name):
    """Edges that don't exist change nothing."""
    layer, dense = DENSE[name]
    x = np.random.default_rng(1).standard_normal((NODES, 8)).astype(np.float32)
    edges, *relations = random_graph(padding=5)[: 1 if "gcn to" in name else 2]
    params, w = weights_of(layer, x, edges, *relations)
    y = layer.apply({"params": params}, x, edges, *relations)
    expected = dense(x.astype(np.float64), edges[:-5], *(kinds[:-5] for kinds in relations), w)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def nodeformer(rows=NODES):
    """A layer, its rows, which of them exist, edges and parameters."""
    rng = np.random.default_rng(12)
    x = rng.standard_normal((rows, 8)).astype(np.float32)
    edges, _ = random_graph(padding=5)
    layer = NodeFormerLayer(GraphConfig(**TINY).dimensions, temperature=0.5)
    present = np.arange(len(x)) < NODES
    return layer, x, present, edges, drawn(lambda key: layer.init(key, x, present, edges, True))["params"]


@pytest.mark.slow
def test_attention_to_all_nodes_and_edges_equals_a_dense_one():
    """Outputs, the loss on edges, and the gradient of both, by finite differences in float64."""
    layer, x, present, edges, params = nodeformer()
    w = named(params)
    directions = np.asarray(performer_projection(jax.random.key(0), layer.features, 4), np.float64)
    towards = np.random.default_rng(13).standard_normal(x.shape)

    def ours(x):
        y, loss = layer.apply({"params": params}, x, present, edges, True)
        return jnp.sum(y * towards) + loss, (y, loss)

    def exact(x):
        y, loss = dense_nodeformer(x, edges[:-5], w, directions, layer.temperature)
        return np.sum(y * towards) + loss, (y, loss)

    (_, (y, loss)), gradient = jax.value_and_grad(ours, has_aux=True)(x)
    _, (expected, expected_loss) = exact(x.astype(np.float64))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for place in np.ndindex(x.shape):
        step = np.zeros(x.shape)
        step[place] = 1e-6
        slope = (exact(x + step)[0] - exact(x - step)[0]) / 2e-6
        np.testing.assert_allclose(gradient[place], slope, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_gumbel_noise_samples_the_softmax():
    """With a low temperature a sample reads one node, and nodes are read as often as their weights say."""
    x = np.zeros((NODES, 8), np.float32)
    x[:, 0] = np.arange(NODES)
    layer, _, present, _, params = nodeformer()
    layer = layer.clone(temperature=0.01, samples=4000)
    params = jax.tree.map(jnp.zeros_like, params)
    params["value"]["kernel"] = params["value"]["kernel"].at[0, 0, 0].set(1.0)
    params["out"]["kernel"] = params["out"]["kernel"].at[0, 0].set(1.0)
    no_edges = np.zeros((0, 2), np.int32)
    one = layer.clone(samples=1)

    def read(key):
        return one.apply({"params": params}, x, present, no_edges, False, rngs={"dropout": key})[0][0, 0]

    reads = np.asarray(jax.jit(jax.vmap(read))(jax.random.split(jax.random.key(3), 200)))
    nearest = np.round(reads)
    assert set(nearest) == set(range(NODES))
    assert np.mean(np.abs(reads - nearest) < 0.05) > 0.8
    y, _ = layer.apply({"params": params}, x, present, no_edges, False, rngs={"dropout": jax.random.key(1)})
    # The mean of 4,000 draws from 0 to 6 has a standard deviation of 2 / sqrt(4000) = 0.03.
    np.testing.assert_allclose(y[:, 0], 3.0, atol=0.15)


def test_nodes_that_do_not_exist_get_no_attention():
    layer, x, present, edges, params = nodeformer(NODES + 2)
    run = jax.jit(lambda x, present, edges: layer.apply({"params": params}, x, present, edges, True))
    y, loss = run(x[:NODES], present[:NODES], edges[:-5])
    padded = np.where(edges == NODES, NODES + 2, edges)
    again, other = run(x, present, padded)
    np.testing.assert_allclose(again[:NODES], y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(other, loss, rtol=1e-5)


@pytest.mark.parametrize("hgn", [False, True])
def test_attention_over_edges_equals_a_dense_one(hgn):
    """Simple-HGN distinguishes kinds of edges and mixes in the earlier layer's weights."""
    x = np.random.default_rng(2).standard_normal((NODES, WIDTH)).astype(np.float32)
    d = GraphConfig(**TINY).dimensions
    edges, relations = random_graph(padding=5)
    looped = add_loops(jnp.asarray(edges), jnp.asarray(relations), NODES, RELATIONS)
    layer = GATLayer(d, heads=2, features=3, relations=RELATIONS + 1 if hgn else 0, beta=0.3)
    params, w = weights_of(layer, x, *looped)
    exact = (x.astype(np.float64), edges[:-5], relations[:-5], w)
    earlier = np.random.default_rng(3).random((NODES, NODES, 2))
    given = None
    if hgn:
        senders, receivers = np.asarray(looped[0]).T
        given = earlier[np.minimum(receivers, NODES - 1), senders].astype(np.float32)
    y, _ = layer.apply({"params": params}, x, *looped, given)
    expected, _ = dense_gat(*exact, *((earlier, 0.3) if hgn else ()))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["simple_hgn", "rgcn", "nodeformer"])
def test_edges_and_nodes_that_do_not_exist_change_nothing(name):
    """Neither outputs nor gradients, even if attention has large scores."""
    config = GraphConfig(**TINY, network=name, num_relations=RELATIONS)
    x = 30 * np.random.default_rng(4).standard_normal((NODES, 8)).astype(np.float32)
    edges, relations = random_graph(padding=5)
    network = MessagePassing(config)
    params = jax.jit(lambda key: network.init(key, x, np.ones(NODES, bool), edges, relations, True))(
        jax.random.key(0)
    )

    def loss(params, x, edges, relations):
        y = network.apply(params, x, np.arange(len(x)) < NODES, edges, relations, True)[:NODES]
        return jnp.sum(jnp.sin(y / 30)), y  # rounding of a large output does not change this loss's slope

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, y), grads = run(params, x, edges[:-5], relations[:-5])
    padded = np.where(edges == NODES, NODES + 2, edges)
    (_, again), other = run(params, np.concatenate([x, np.full((2, 8), 5, np.float32)]), padded, relations)
    np.testing.assert_allclose(again, y, rtol=1e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


@pytest.mark.slow
def test_each_layer_of_nodeformer_leaves_its_loss_on_edges():
    """The task adds their mean to the loss of training, and to no other."""
    config = GraphConfig(
        **{**TINY, "num_layers": 2}, network="nodeformer", kinds=(0,) * NODES, num_features=WIDTH
    )
    edges, relations = random_graph(padding=2)
    x = np.random.default_rng(14).standard_normal((1, NODES, WIDTH)).astype(np.float32)
    batch = {
        "features": x, "present": np.ones((1, NODES), np.int32), "places": np.arange(4, dtype=np.int32)[None],
        "edges": edges[None], "relations": relations[None], "targets": np.zeros((1, 4), np.int32),
        "weights": np.ones((1, 4), np.float32),
    }  # fmt: skip
    model = NodeClassifier(config)
    objective = graph_objective(model)
    params = drawn(objective.init)
    key = jax.random.key(2)
    logits, sown = apply_to(model, params, batch, key, mutable=["losses"])
    losses = jax.tree.leaves(sown["losses"])
    assert [loss.shape for loss in losses] == [(1,), (1,)]
    of_classes = -jax.nn.log_softmax(logits)[..., 0].mean()
    total, weight, *_ = objective.loss(params, None, batch, key)
    np.testing.assert_allclose(total / weight, of_classes + EDGE_LOSS * np.mean(losses), rtol=1e-5)
    logits = apply_to(model, params, batch)
    total, weight, *_ = objective.loss(params, None, batch, None)
    np.testing.assert_allclose(total / weight, -jax.nn.log_softmax(logits)[..., 0].mean(), rtol=1e-5)


def test_tokens_that_exist_come_first():
    present = jnp.asarray([[False, True, False, True], [False] * 4, [True] * 4])
    order, number = first_present(present)
    assert order.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert number.tolist() == [2, 1, 4]


@pytest.mark.parametrize(
    "mechanism", [FullConfig(), pytest.param(BRLConfig(window=32, num_compressed=4), marks=pytest.mark.slow)]
)
def test_a_set_of_tokens_has_no_order(mechanism):
    """Permuted tokens give permuted outputs, and absent tokens change nothing, wherever they are. Compressed tokens
    read a set; if the window covers all of it, so does the local attention."""
    config = GraphConfig(**TINY, mechanism=mechanism)
    rng = np.random.default_rng(5)
    x = rng.standard_normal((2, 9, 8)).astype(np.float32)
    present = np.array([[1, 0, 1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 1, 0]], bool)
    network = SetEncoder(config)
    params = drawn(lambda key: network.init(key, x, present, True))
    run = jax.jit(lambda x, present: network.apply(params, x, present, True))
    y = np.asarray(run(x, present))
    order = rng.permutation(9)
    np.testing.assert_allclose(run(x[:, order], present[:, order])[present[:, order]], y[:, order][present[:, order]],
                               rtol=1e-4, atol=1e-5)  # fmt: skip
    np.testing.assert_array_equal(run(np.where(present[..., None], x, np.nan), present)[present], y[present])


@pytest.mark.slow
@pytest.mark.parametrize(
    "network", ["mlp", "gcn", "rgcn", "gat", "simple_hgn", "hgt", "han", "nodeformer", "nodes"]
)
def test_nodes_have_no_order(network):
    """Permuting nodes of one type along with their edges permutes the outputs."""
    config = GraphConfig(
        **TINY, network=network, kinds=(0,) * 4 + (1,) * 3, num_features=WIDTH, num_relations=RELATIONS,
        mechanism=FullConfig(),
    )  # fmt: skip
    edges, relations = random_graph(padding=3)
    x = np.random.default_rng(6).standard_normal((1, NODES, WIDTH)).astype(np.float32)
    present = np.ones((1, NODES), np.int32)
    places = np.arange(4, dtype=np.int32)[None]
    model = NodeClassifier(config)
    graph = {"edges": edges[None], "relations": relations[None]} if config.has_edges else {}
    params = drawn(model.init, x, present, places=places, **graph)
    run = jax.jit(model.apply)
    y = run(params, x, present, places=places, **graph)
    new = np.array([2, 0, 3, 1, 5, 6, 4, 7])  # each node's new position
    moved = np.zeros_like(x)
    moved[:, new[:NODES]] = x
    if graph:
        graph["edges"] = new[edges][None].astype(np.int32)
    again = run(params, moved, present, places=new[places].astype(np.int32), **graph)
    np.testing.assert_allclose(again, y, rtol=1e-4, atol=1e-5)


def test_nodes_with_vectors_of_their_own_ignore_features():
    """Also features that are NaN, and two nodes without any edge differ."""
    config = GraphConfig(
        **TINY, network="gcn", kinds=(0,) * 4 + (1,) * 3, num_features=WIDTH, identities=True
    )
    edges, relations = np.zeros((1, 0, 2), np.int32), np.zeros((1, 0), np.int32)
    arguments = {"edges": edges, "relations": relations, "places": np.arange(4, dtype=np.int32)[None]}
    x, present = np.full((1, NODES, WIDTH), np.nan, np.float32), np.ones((1, NODES), np.int32)
    model = NodeClassifier(config)
    params = drawn(model.init, x, present, **arguments)
    run = jax.jit(model.apply)
    y = run(params, x, present, **arguments)
    assert np.unique(np.asarray(y)[0, :, 0]).size == 4
    np.testing.assert_array_equal(run(params, np.zeros_like(x), present, **arguments), y)


def test_tokens_of_one_kind_have_no_order():
    """Nor does an absent token of a list change anything."""
    config = GraphConfig(**TINY, kinds=(0, 1, 1, 1, 2), num_features=WIDTH, mechanism=FullConfig())
    x = np.random.default_rng(7).standard_normal((1, 5, WIDTH)).astype(np.float32)
    present = np.array([[1, 1, 0, 1, 1]], np.int32)
    model = NodeClassifier(config)
    params = drawn(model.init, x, present)
    run = jax.jit(lambda x, present: model.apply(params, x, present))
    y = np.asarray(run(x, present))
    assert y.shape == (1, 1, 2)
    order = np.array([0, 2, 3, 1, 4])
    np.testing.assert_allclose(run(x[:, order], present[:, order]), y, rtol=1e-4, atol=1e-5)
    other = x.copy()
    other[:, 2] = np.nan
    np.testing.assert_array_equal(run(other, present), y)
    assert not np.allclose(run(x[:, [0, 4, 2, 3, 1]], present), y, atol=1e-3)
