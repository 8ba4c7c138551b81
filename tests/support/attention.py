"""Inputs for attention functions, and comparisons with the float64 references."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from tests.oracles import attention as oracles


def random_qkv(
    num_queries, num_keys=None, batch=2, heads=4, kv_heads=2, head_dim=8, dtype=jnp.float32, seed=0
):
    """query, key, value and a cotangent of the output."""
    num_keys = num_queries if num_keys is None else num_keys
    rng = np.random.default_rng(seed)
    shapes = [(num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads), (num_queries, heads)]
    return [jnp.asarray(rng.standard_normal((batch, t, n, head_dim)), dtype) for t, n in shapes]


def pulled(function, cotangent, *operands):
    """The output, and the gradients of the operands by the output's cotangent, in one program."""

    def both(operands, cotangent):
        out, pull = jax.vjp(function, *operands)
        return out, *pull(cotangent)

    return jax.jit(both)(operands, cotangent)


def outputs_and_gradients(function, query, key, value, d_out, *, by=(), **options):
    """The output and the gradients of query, key, value and the options that `by` names, in one compiled function that
    traces these and other arrays among the options."""

    @jax.jit
    def both(query, key, value, d_out, named, traced):
        def run(query, key, value, *named):
            return function(query, key, value, **dict(zip(by, named)), **options, **traced)

        out, pull = jax.vjp(run, query, key, value, *named)
        return out, *pull(d_out)

    named = [options.pop(name) for name in by]
    traced = {k: options.pop(k) for k in list(options) if isinstance(options[k], (jax.Array, np.ndarray))}
    return both(query, key, value, d_out, named, traced)


def check(function, oracle, operands, tolerance=1e-4, of_output=2e-5):
    """Compares the output with the oracle's, and the gradients of a random weighting of it along random directions with
    the oracle's complex steps."""
    rng = np.random.default_rng(1)
    expected = oracle(*operands)
    weight = rng.standard_normal(expected.shape)
    out, *grads = pulled(function, *(jnp.asarray(x, jnp.float32) for x in (weight, *operands)))
    assert oracles.relative_error(out, expected) < of_output
    for i, grad in enumerate(grads):
        direction = rng.standard_normal(operands[i].shape)
        stepped = [x + 1e-30j * direction if j == i else x for j, x in enumerate(operands)]
        expected = np.imag((oracle(*stepped) * weight).sum()) / 1e-30
        grad = np.asarray(grad, np.float64)
        scale = np.linalg.norm(grad) * np.linalg.norm(direction) / np.sqrt(max(direction.size, 1))
        # Of a gradient that is 0, rounding remains.
        assert abs((grad * direction).sum() - expected) <= tolerance * max(scale, abs(expected), 0.1), i


def expect(arrays, visible, **kwargs):
    query, key, value, d_out = arrays
    out, _ = oracles.softmax_attention(query, key, value, visible, **kwargs)
    gradients = oracles.softmax_attention_gradients(query, key, value, visible, d_out, **kwargs)
    return out, *gradients


def with_padding(arrays, query_lengths, key_lengths):
    """The arrays with NaN beyond the lengths, the lengths as options, and which pairs exist, (B, 1, T, S)."""
    lengths = {"query_seq_lengths": query_lengths, "key_value_seq_lengths": key_lengths}
    rows, columns = (np.arange(x.shape[1]) < np.asarray(n)[:, None] for x, n in zip(arrays, lengths.values()))
    poisoned = [
        jnp.where(inside[:, :, None, None], x, jnp.nan)
        for x, inside in zip(arrays, (rows, columns, columns, rows))
    ]
    lengths = {name: jnp.asarray(n) for name, n in lengths.items()}
    return poisoned, lengths, rows[:, None, :, None] & columns[:, None, None, :]


def check_causal(attend, arrays, places, sees=lambda t: True):
    """Whatever happens from token t on leaves every earlier output bitwise unchanged; token t's changes if it sees
    any."""
    attend, arrays = jax.jit(attend), arrays[:3]
    before = np.asarray(attend(*arrays))
    for t in places:
        after = np.asarray(attend(*(x.at[:, t:].add(3.0) for x in arrays)))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any() == sees(t)


def assert_close(got, expected, tolerance=1e-4):
    for what, x, y in zip(("out", "d_query", "d_key", "d_value"), got, expected):
        error = oracles.relative_error(x.astype(jnp.float32), y)
        assert error < tolerance, f"{what}: relative error {error}"


def close(actual, expected, tolerance=2e-5):
    """Asserts that the norm of the difference is at most `tolerance` times the norm of the expected value."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


def largest_array(hlo):
    shapes = re.findall(r"\b(?:f32|bf16|pred|s32|u32|u8|s8)\[([\d,]+)\]", hlo)
    return max(int(np.prod([int(d) for d in shape.split(",")])) for shape in shapes)
