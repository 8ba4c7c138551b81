"""Sums of messages over edges, in blocks and at once, against dense float64 sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.models import graph_layers
from brl_jax.models.graph_layers import sum_of_messages
from tests.laws.cases import dimensions

NODES, HEADS, FEATURES = 11, 3, 5


def case(edges, dtype):
    """(x, weights, edges, the sums' gradient); every fifth edge does not exist."""
    rng = np.random.default_rng(edges)
    ends = rng.integers(NODES, size=(edges, 2)).astype(np.int32)
    ends[::5, 1] = NODES
    ends[::5, 0] = NODES - 1
    shapes = ((NODES, HEADS, FEATURES), (edges, HEADS), (NODES, HEADS, FEATURES))
    x, weights, d_sum = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return x, weights, ends, d_sum


def dense(x, weights, edges, d_sum):
    """The sums, and the gradients of x and the weights."""
    x, weights, d_sum = (np.asarray(array, np.float64) for array in (x, weights, d_sum))
    out, d_x, d_weights = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weights)
    for edge, (sender, receiver) in enumerate(edges):
        if receiver < NODES:
            out[receiver] += weights[edge][:, None] * x[sender]
            d_x[sender] += weights[edge][:, None] * d_sum[receiver]
            d_weights[edge] = np.sum(x[sender] * d_sum[receiver], axis=-1)
    return out, d_x, d_weights


def close(found, expected, dtype):
    error = np.linalg.norm(np.asarray(found, np.float64) - expected)
    assert error <= (1e-6 if dtype == jnp.float32 else 2e-2) * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("edges", [0, 1, 16, 37])
def test_in_blocks_and_at_once_as_a_dense_sum(monkeypatch, dtype, edges):
    """Blocks of 16: none, one with a single edge, a full one, and an incomplete last one."""
    monkeypatch.setattr(graph_layers, "EDGES_OF_BLOCK", 16)
    x, weights, ends, d_sum = case(edges, dtype)
    expected = dense(x, weights, ends, d_sum)
    for forward, backward in (
        (graph_layers._sum_in_blocks, graph_layers._gradients_in_blocks),
        (graph_layers._sum_at_once, graph_layers._gradients_at_once),
    ):
        found = (forward(x, weights, ends), *backward(x, weights, ends, d_sum))
        for a, b in zip(found, expected):
            assert a.dtype == dtype
            close(a, b, dtype)


@pytest.mark.slow
def test_gradients_and_their_derivatives(monkeypatch):
    """They equal the gradients of a segment sum, also for rows of graphs and in forward mode."""
    monkeypatch.setattr(graph_layers, "EDGES_OF_BLOCK", 16)
    x, weights, ends, d_sum = case(37, jnp.float32)
    out, pull = jax.vjp(lambda x, weights: sum_of_messages(x, weights, ends), x, weights)
    for a, b in zip((out, *pull(d_sum)), dense(x, weights, ends, d_sum)):
        close(a, b, jnp.float32)
    rows = jax.vmap(sum_of_messages)(*(jnp.stack([a, a[::-1]]) for a in (x, weights, jnp.asarray(ends))))
    close(rows[1], dense(x[::-1], weights[::-1], ends[::-1], d_sum)[0], jnp.float32)

    def slope(function, x, weights):
        loss = lambda x, weights: jnp.sum(jnp.sin(function(x, weights, ends)))  # noqa: E731
        return jnp.sum(jax.grad(loss, 1)(x, weights) ** 2)

    found = jax.grad(slope, (1, 2))(sum_of_messages, x, weights)
    expected = jax.grad(slope, (1, 2))(graph_layers._sum_at_once, x, weights)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    moved = jax.jvp(lambda x: sum_of_messages(x, weights, ends), (x,), (d_sum,))[1]
    close(moved, dense(d_sum, weights, ends, d_sum)[0], jnp.float32)


@pytest.mark.slow
def test_a_thousand_neighbours_in_bfloat16():
    """A sum in bfloat16 would stop at 256; counts, messages, gradients and weights are summed in float32."""
    number = 1000
    ends = jnp.stack([jnp.arange(number) % 7 + 1, jnp.zeros(number, jnp.int32)], axis=-1).astype(jnp.int32)
    ones = jnp.ones((number, 1), jnp.bfloat16)
    assert graph_layers.sum_at(ones, ends[:, 1], 8)[0] == 1000
    weights = graph_layers.softmax_at(jnp.zeros_like(ones), ends[:, 1], 8)
    assert weights.dtype == jnp.bfloat16
    assert weights.astype(jnp.float32).sum() == pytest.approx(1, abs=1e-2)
    x = jnp.ones((8, 1, 1), jnp.bfloat16)
    for forward, backward in (
        (graph_layers._sum_in_blocks, graph_layers._gradients_in_blocks),
        (graph_layers._sum_at_once, graph_layers._gradients_at_once),
    ):
        assert forward(x, ones, ends)[0, 0, 0] == 1000
        d_x, _ = backward(x, ones, ends[:, ::-1], x)
        assert d_x[0, 0, 0] == 1000
    layer = graph_layers.GCNLayer(dimensions(False, dtype=jnp.bfloat16), features=1)
    variables = layer.init(jax.random.key(0), x[:, 0], ends)
    # The sender has no neighbours; the receiver has 1001, including itself.
    out = layer.apply(variables, x[:, 0], ends) / layer.apply(variables, x[:, 0], ends[:0])
    expected = (number + 1001**-0.5) / 1001**0.5
    assert out.dtype == jnp.bfloat16
    assert out[0, 0].astype(jnp.float32) == pytest.approx(expected, rel=2e-2)


def test_no_message_of_all_edges_exists_at_once():
    """On a CPU, a step's temporary memory does not grow with the messages (E, N, O)."""
    nodes, edges, heads, features = 64, 1 << 17, 4, 32
    shapes = [(nodes, heads, features), (edges, heads)]
    x, weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    ends = jax.ShapeDtypeStruct((edges, 2), jnp.int32)
    step = jax.jit(jax.grad(lambda *a: jnp.sum(sum_of_messages(*a) ** 2), (0, 1)))
    needed = step.lower(x, weights, ends).compile().memory_analysis().temp_size_in_bytes
    assert needed < edges * heads * features * 4 / 2
