"""Compares one device with a mesh of eight, two rows of four, in the process of `tests.support.devices`.

A test module names its cases in PARTS and asks for them through the fixture `devices`; the functions here run there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from brl_jax.sharding import MeshConfig, make_mesh
from tests.support.collectives import collectives


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(data=2, fsdp=1, sequence=4))


def draw(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def with_gradients(function: Callable[..., Any]) -> Any:
    """The function's results and its operands' gradients, in one program."""

    def both(*operands):
        out, pull = jax.vjp(function, *operands)
        wave = lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)  # noqa: E731
        return out, pull(jax.tree.map(wave, out))

    return jax.jit(both)


def compared(function: Callable[..., Any], *operands: Any) -> list[list[np.ndarray]]:
    """The results and gradients on one device, and on the mesh."""
    alone = jax.tree.leaves(with_gradients(function)(*operands))
    with jax.set_mesh(mesh()):
        shared = jax.tree.leaves(with_gradients(function)(*operands))
    return [[np.asarray(x) for x in found] for found in (alone, shared)]


def after(function: Callable[..., Any], place: int, tokens: Any, *others: Any) -> list[np.ndarray]:
    """The output on the mesh, and the output with other tokens from `place` on."""
    other = [x.at[:, place:].add(3.0) for x in tokens]
    with jax.set_mesh(mesh()):
        run = jax.jit(function)
        return [np.asarray(run(*x, *others)) for x in (tokens, other)]


def moved(function: Callable[..., Any], *operands: Any, length: int) -> list[tuple[str, int]]:
    """(kind, elements) that each collective brings to a device, if the rows of `length` have 4,096 tokens."""

    def shape(x):
        dims = [4096 if n == length else n for n in x.shape]
        spec = PartitionSpec("data", "sequence") if length in x.shape else PartitionSpec()
        return jax.ShapeDtypeStruct(dims, x.dtype, sharding=NamedSharding(mesh(), spec))

    with jax.set_mesh(mesh()):
        return collectives(with_gradients(function).lower(*jax.tree.map(shape, operands)).compile())


def check_equal(expected: Any, got: Any, tolerance: float = 1e-5) -> None:
    """Asserts that each array is finite and close to the expected one, relative to its largest number, which is not
    near 0."""
    for x, y in zip(expected, got, strict=True):
        assert np.isfinite(y).all()
        assert np.abs(x).max() > 0.01
        assert np.abs(y - x).max() <= tolerance * np.abs(x).max()


def check_prefix(whole: np.ndarray, other: np.ndarray, place: int) -> None:
    """Asserts that no bit changes before the place, and something does after it."""
    assert (whole[:, :place] == other[:, :place]).all()
    assert not (whole[:, place:] == other[:, place:]).all()
