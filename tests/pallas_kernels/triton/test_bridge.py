"""The path to a GPU kernel, as far as it goes without Triton: the target, the launch, vmap."""

import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triton.core import bridge
from pallas_kernels.triton.core.sizes import PairTile
from pallas_kernels.triton.squared_relu.api import squared_relu_unsupported


def no_kernel(x, out, SIZE):
    """Never compiled in this file."""


def launch(x):
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return bridge.launch(no_kernel, (x,), (result,), (1,), {"SIZE": 3}, PairTile(16, 16, 4, 1))[0]


def test_the_target_is_given_or_else_hoppers(monkeypatch):
    monkeypatch.delenv("BRL_JAX_GPU_CAPABILITY", raising=False)
    assert bridge.target_capability() == 90
    for given, tuned in (("75", 80), ("80", 80), ("89", 80), ("103", 100), ("120", 80)):
        monkeypatch.setenv("BRL_JAX_GPU_CAPABILITY", given)
        assert bridge.target_capability() == int(given)
        assert bridge.tuned_for((100, 90, 80)) == tuned
    monkeypatch.setenv("BRL_JAX_GPU_CAPABILITY", "9.0")
    with pytest.raises(ValueError, match=r"BRL_JAX_GPU_CAPABILITY must be a whole number .* got '9.0'"):
        bridge.target_capability()


def test_a_launch_runs_on_cuda_alone():
    """It traces anywhere, is dropped if its result is unused, and raises an error when lowered for another platform."""
    x = jnp.ones((2, 3))
    traced = jax.jit(launch).trace(x)
    assert "gpu_kernel_launch" in str(traced.jaxpr)
    with pytest.raises(
        NotImplementedError, match=r"the kernel no_kernel runs only on CUDA, .* lowered for cpu"
    ):
        traced.lower(lowering_platforms=("cpu",))
    with pytest.raises(NotImplementedError, match="runs only on CUDA"):
        launch(x)
    np.testing.assert_array_equal(jax.jit(lambda x: (launch(x), x)[1])(x), x)


@pytest.mark.slow
def test_long_batches_are_several_calls(monkeypatch):
    """Split by the rows that a grid allows and by the range of int32, in a mapped call too."""
    rows = []

    def run(_, x, y):
        rows.append(len(x))
        return x + y[:, None], 2 * y

    x = jnp.arange(60.0).reshape(20, 3)
    y = jnp.arange(20.0)
    for limits, expected in (
        (("_ROWS", 8), [8, 8, 4]),
        (("_NUMBERS", 20), [6, 6, 6, 2]),
        (("_NUMBERS", 2), [1] * 20),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(bridge, *limits)
            folded = functools.partial(bridge.fold_vmap(run), None)
            for got in (folded(x, y), jax.vmap(folded)(x[None], y[None])):
                np.testing.assert_array_equal(jnp.squeeze(got[0]), x + y[:, None])
                np.testing.assert_array_equal(jnp.squeeze(got[1]), 2 * y)
                assert rows[-len(expected) :] == expected
    large = jax.ShapeDtypeStruct((1, 2**21, 8, 128), jnp.bfloat16)
    monkeypatch.setattr(bridge, "unsupported", lambda: None)
    reason = "a row of query must have fewer than 2^31 numbers, got 2147483648"
    assert bridge.array_unsupported(large, large, most_head_dim=256) == reason
    few, wide = (jax.ShapeDtypeStruct((1, 2**15, *rest), jnp.bfloat16) for rest in ((8, 64), (1, 2**13)))
    assert squared_relu_unsupported(few, few, few) is None
    reason = reason.replace("query", "result")
    assert squared_relu_unsupported(few, few, wide) == reason


def test_vmap_is_one_call_on_a_longer_batch():
    shapes = []

    def run(_, x, y):
        shapes.append((x.shape, y.shape))
        return x + y, x * y

    x, y = (np.random.default_rng(i).normal(size=(5, 2, 3)).astype(np.float32) for i in range(2))
    folded = functools.partial(bridge.fold_vmap(run), None)
    got = jax.vmap(folded)(x, y)
    assert shapes[-1] == ((10, 3), (10, 3))
    for a, b in zip(got, (x + y, x * y)):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(jax.vmap(folded, (0, None))(x, y[0]), (x + y[:1], x * y[:1])):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(jax.vmap(jax.vmap(folded))(x[None], y[None]), (x + y, x * y)):
        np.testing.assert_array_equal(a[0], b)


def test_the_floor_of_triton(monkeypatch, tmp_path):
    """Uses the version of the module that would be imported, whatever package metadata says."""
    monkeypatch.delenv("BRL_JAX_GPU_CAPABILITY", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bridge, "_PACKAGES", ())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delitem(sys.modules, "triton", raising=False)  # another test may have imported the real one
    for given, refused in (
        ("3.6.0", True),
        ("3.7.0+git1", True),
        ("3.7.1", False),
        ("3.10.0", False),
        (None, False),
    ):
        (tmp_path / "triton.py").write_text("" if given is None else f"__version__ = '{given}'\n")
        importlib.invalidate_caches()
        bridge.triton_version.cache_clear()
        assert bridge.triton_version() == (given or "")
        expected = f"Triton must be 3.7.1 or newer, got {given}" if refused else None
        assert bridge.unsupported() == expected
    bridge.triton_version.cache_clear()
