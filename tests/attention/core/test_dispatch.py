"""When calls reach the TPU kernels: by lowering, by force, or not at all."""

from __future__ import annotations

import functools
import logging
import math
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning

from brl_jax import ALiBi, BlockMask, T5Bias, alibi_slopes, compress, local_attention, propagate
from brl_jax.attention.core import dispatch as kernels
from brl_jax.attention.core.by_platform import by_platform, without_kept
from tests.marks import slow_unless
from tests.support.numbers import relative_error


def arrays(*shapes):
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


TOKENS, FEW = (1, 150, 2, 32), (1, 7, 2, 32)
CALLS = {
    "local_attention": (
        lambda i, q, k, v: local_attention(
            q,
            k,
            v,
            local_window_size=(40, 3),
            is_causal=True,
            key_value_seq_lengths=jnp.array([140]),
            implementation=i,
        ),
        (TOKENS, TOKENS, TOKENS),
    ),
    "compress": (
        lambda i, q, k, c, v: compress(q, k, c, v, gamma=0.3, scale=0.5, implementation=i),
        (FEW, TOKENS, TOKENS, TOKENS),
    ),
    "propagate": (
        lambda i, q, k, v: propagate(q, k, v, strength=0.5, implementation=i),
        (TOKENS, FEW, FEW),
    ),
}


@pytest.mark.parametrize("name", slow_unless(CALLS, ("propagate",)))
def test_forced_kernel_under_transformations(name):
    """Gradients under vmap, scan and remat equal XLA's."""
    call, shapes = CALLS[name]
    operands = arrays(*((2, *shape) for shape in shapes))

    def grads(implementation):
        def loss(*xs):
            return jnp.sum(call(implementation, *xs) ** 2)

        def scanned(*xs):
            return jax.lax.scan(lambda s, x: (s + jax.checkpoint(loss)(*x), None), 0.0, xs)[0]

        both = jax.jit(lambda *xs: (jax.vmap(jax.grad(loss))(*xs), jax.grad(scanned)(*xs)))
        return both(*operands)

    for a, b in zip(grads("pallas_interpret"), grads("xla")):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("name", CALLS)
def test_platform_decides_when_lowering(name):
    """By default, a call lowered on this host for a TPU contains the kernel; lowered for a CPU it does not."""
    call, shapes = CALLS[name]
    gradient = jax.jit(jax.grad(lambda *xs: jnp.sum(call(None, *xs) ** 2)))
    traced = gradient.trace(*arrays(*shapes))
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    for several in (("cpu", "tpu"), ("tpu", "cuda")):
        assert "tpu_custom_call" in traced.lower(lowering_platforms=several).as_text()


@pytest.mark.parametrize("name", CALLS)
def test_forced_kernel_refuses_other_platforms(name):
    """A requested kernel runs natively or raises an error, whatever wraps the call."""
    call, shapes = CALLS[name]
    operands = arrays(*shapes)
    forced = functools.partial(call, "pallas")
    loss = lambda *xs: jnp.sum(forced(*xs) ** 2)  # noqa: E731
    expected = (
        f"{name} with implementation='pallas' runs on the platform 'tpu' alone.* lowered for 'cpu'; ask for"
    )
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P("data")
    wrapped = {
        "eager": forced,
        "grad": jax.grad(loss, argnums=tuple(range(len(operands)))),
        "remat": jax.grad(jax.checkpoint(loss)),
        "vmap": lambda *xs: jax.vmap(forced)(*(x[None] for x in xs)),
        "scan": lambda *xs: jax.lax.scan(lambda s, x: (s + loss(*x), None), 0.0, [x[None] for x in xs]),
        "shard_map": jax.shard_map(forced, mesh=mesh, in_specs=(rows,) * len(operands), out_specs=rows),
    }
    for what, function in wrapped.items():
        with pytest.raises(NotImplementedError, match=expected):
            function(*operands)
        traced = jax.jit(function).trace(*operands)
        with pytest.raises(NotImplementedError, match=expected):
            traced.lower(lowering_platforms=("cpu",))
        with pytest.raises(NotImplementedError, match="lowered for 'cpu'; ask for"):
            traced.lower(lowering_platforms=("cpu", "tpu"))
        assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text(), what
    with pytest.raises(NotImplementedError, match="lowered for 'cuda'"):
        jax.jit(forced).trace(*operands).lower(lowering_platforms=("cuda",))


def test_the_first_supporting_backend_runs_the_call(caplog):
    """Backends are tried in order of preference. If none supports the call, XLA runs it and logs each reason once."""

    def backend(name, reason, unsuited=False):
        number = float(len(name))
        return kernels.Backend(name, lambda x, interpret: x + number, lambda x: reason, unsuited)

    def run(*row, implementation=None):
        kernels._warn_once.cache_clear()
        caplog.clear()
        call = lambda x: kernels.dispatch("f", implementation, {"cpu": row}, lambda x: x, x)  # noqa: E731
        out = jax.jit(call)(jnp.zeros(()))
        return float(out), [record.message for record in caplog.records]

    one, three = backend("a", None), backend("abc", None)
    old, few = backend("ab", "too old"), backend("abcd", "too few")
    assert run(one, three) == (1, [])
    assert run(old, three, one) == (3, [])
    assert run(backend("a", None, unsuited=True), three) == (3, [])
    where = "f runs through XLA on the platform 'cpu', at linear cost"
    assert run(old, few, backend("c", "too old")) == (0, [f"{where}: too old; too few"])
    assert run(old, three, implementation="abc") == (3, [])
    with pytest.raises(NotImplementedError, match="f with implementation='ab': too old"):
        run(old, three, implementation="ab")


def test_calls_that_no_kernel_supports(caplog):
    """If forced, an error names the argument; by default XLA runs the call and logs that once."""
    q, k, v = arrays(TOKENS, TOKENS, TOKENS)
    refused = {
        "bias must be None or depend on the distance alone (`DistanceBias`), got an array": {
            "local_window_size": 5,
            "bias": jnp.zeros((2, 1, 1)),
        },
        "blocks of BlockMask must hold at least 8 positions, got 4": {
            "pattern": BlockMask.of(4, np.eye(38, dtype=bool))
        },
    }
    for message, arguments in refused.items():
        with pytest.raises(NotImplementedError, match=re.escape(message)):
            local_attention(q, k, v, implementation="pallas", **arguments)
        kernels._warn_once.cache_clear()
        caplog.clear()
        for length in (140, 141):
            call = jax.jit(functools.partial(local_attention, **arguments))
            traced = call.trace(*(x[:, :length] for x in (q, k, v)))
            traced.lower(lowering_platforms=("cpu",))
            assert not caplog.records
        for _ in range(2):
            traced.lower(lowering_platforms=("tpu",))
        assert [r.levelno for r in caplog.records] == [logging.WARNING]
        assert [r.message for r in caplog.records] == [
            f"local_attention runs through XLA on the platform 'tpu', at linear cost: {message}"
        ]
    for length, kernel in ((1, False), (127, False), (128, True)):
        decode = jax.jit(
            lambda q, k, v, length=length: local_attention(
                q, k, v, local_window_size=9, query_offset=k.shape[1] - length
            )
        )
        text = decode.trace(q[:, -length:], k, v).lower(lowering_platforms=("tpu",)).as_text()
        assert ("tpu_custom_call" in text) == kernel
    with pytest.raises(NotImplementedError, match="float16"):
        local_attention(
            *(x.astype(jnp.float16) for x in (q, k, v)), local_window_size=5, implementation="pallas"
        )
    wide = [jnp.tile(x, 9) for x in (q, k, v)]
    with pytest.raises(NotImplementedError, match="a head_dim up to 256, got 288"):
        local_attention(*wide, local_window_size=5, implementation="pallas")
    local_attention(*wide, local_window_size=5)
    with pytest.raises(ValueError, match="implementation must be"):
        propagate(q, k[:, :5], v[:, :5], strength=1.0, implementation="magic")


@pytest.mark.parametrize("bias", [ALiBi(alibi_slopes(2)), T5Bias(jnp.zeros((32, 2)))])
def test_biases_are_linear_on_a_tpu(bias):
    """No array in the forward or backward pass grows faster than the length."""

    def largest(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)

        def loss(q, k, v, bias):
            return local_attention(q, k, v, local_window_size=(63, 0), is_causal=True, bias=bias).sum()

        lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(x, x, x, bias)
        text = lowered.lower(lowering_platforms=("tpu",)).as_text()
        return max(
            math.prod(map(int, sizes.split("x")[:-1])) for sizes in re.findall(r"tensor<([\dx]+)", text)
        )

    assert largest(1 << 14) <= 2.1 * largest(1 << 13)


@pytest.mark.parametrize("length", slow_unless([1, 29, 128, 129, 300], (29, 129)))
def test_short_sequences_lower_for_tpu(length):
    """Sequences that fit in one or two blocks, with windows from one key to all, forward and backward."""
    x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)
    for left in (0, length // 2, length - 1):

        def loss(q, k, v, left=left):
            return local_attention(q, k, v, local_window_size=(left, 0), is_causal=True).sum()

        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(x, x, x)
        assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_a_form_may_be_partitioned_by_hand():
    """Like cuDNN's. JAX tells lowering rules the devices only if a program seems to need them (`by_platform`)."""
    x = jnp.ones(3)
    sine = custom_partitioning(jnp.sin)
    sine.def_partition(partition=lambda *_: None, sharding_rule="i -> i")

    def call(x):
        return by_platform(lambda *_: without_kept(sine), x, results=x, plain=jnp.sin, needs_devices=True)

    np.testing.assert_allclose(jax.jit(call)(x), np.sin(1.0), rtol=1e-6)
