"""Every attention function on meshes, computed in the process of simulated devices."""

import functools
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from brl_jax import nystromformer_attention
from brl_jax.attention.dense import sharded
from brl_jax.sharding import MeshConfig, make_mesh
from tests.support.calls import CALLS, make_calls


def _explicit(name):
    """The largest difference in outputs and gradients from one device, and the output's sharding."""
    mesh = jax.make_mesh(
        (2, 2), ("batch", "heads"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4]
    )
    return _compare(name, mesh, P("batch", None, "heads"))


def _automatic(name, **sizes):
    """The same on an automatic mesh, which may also divide the 12 tokens of a row."""
    mesh = make_mesh(MeshConfig(fsdp=1, **sizes), jax.devices()[: 2 * sizes["data"]])
    # Full attention divides fewer tokens than this only on a TPU's kernel.
    with mock.patch.object(sharded, "MANY_TOKENS", 12):
        return _compare(name, mesh, P("data"), length=12)


def _kernels(name):
    """The kernels in the program of 2,048 tokens for four TPUs. To lower it fails if the compiler must divide one."""
    make, call = make_calls(length=2048)[name]
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=1, tensor=2), jax.devices()[:4])):
        arrays = make(2)
        text = jax.jit(lambda *x: call(*x)).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    return re.findall(r'kernel_name = "(\w+)"', text)


def _compare(name, mesh, spec, **sizes):
    make, call = make_calls(**sizes)[name]
    arrays = make(2)

    def loss(arrays):
        out = call(*arrays)
        return jnp.square(out).sum(), out

    both = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, out), gradients = both(arrays)
    with jax.set_mesh(mesh):
        specs = [spec if x.ndim == 4 else P(*spec[:1]) for x in arrays]
        placed = tuple(jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs))
        (_, got), got_gradients = both(placed)
    pairs = zip(jax.tree.leaves((got, got_gradients)), jax.tree.leaves((out, gradients)))
    worst = max(float(np.abs(np.asarray(x) - y).max() / (1 + np.abs(y).max())) for x, y in pairs)
    return worst, tuple(got.sharding.spec)


def _convolution(**sizes):
    """The gradients of Nystromformer's convolution and its values, on one device and on a mesh."""
    draw = np.random.default_rng(0).standard_normal
    value, kernel = (draw(shape).astype(np.float32) for shape in ((4, 24, 4, 6), (4, 5)))

    def loss(value, kernel):
        attend = nystromformer_attention
        return jnp.sin(attend(value, value, value, num_landmarks=2, value_kernel=kernel)).sum()

    alone = jax.jit(jax.grad(loss, (0, 1)))(value, kernel)
    count = math.prod(sizes.values())
    mesh = make_mesh(MeshConfig(fsdp=1, **sizes), jax.devices()[:count])
    with jax.set_mesh(mesh):
        placed = jax.device_put(value, NamedSharding(mesh, P("data", "sequence")))
        shared = jax.jit(jax.grad(loss, (0, 1)))(placed, kernel)
    return [[np.asarray(x) for x in found] for found in (alone, shared)]


PARTS = {
    "convolved heads": lambda: _convolution(data=2, tensor=2),
    "convolved tokens": lambda: _convolution(sequence=4, tensor=2),
}
PARTS |= {f"explicit {name}": functools.partial(_explicit, name) for name in CALLS}
PARTS |= {f"heads {name}": functools.partial(_automatic, name, data=2, tensor=2) for name in CALLS}
PARTS |= {f"tokens {name}": functools.partial(_automatic, name, data=2, sequence=2) for name in CALLS}
PARTS |= {f"kernels {name}": functools.partial(_kernels, name) for name in CALLS}
