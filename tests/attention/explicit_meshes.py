"""Every attention function on an explicit mesh, computed in the process of simulated devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.attention.calls import CALLS


def _compare(name):
    """The largest difference in outputs and gradients from one device, and the output's sharding."""
    make, call = CALLS[name]
    arrays = make(2)
    mesh = jax.make_mesh(
        (2, 2), ("batch", "heads"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4]
    )

    def loss(arrays):
        out = call(*arrays)
        return jnp.square(out).sum(), out

    both = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, out), gradients = both(arrays)
    with jax.set_mesh(mesh):
        specs = [P("batch", None, "heads") if x.ndim == 4 else P("batch") for x in arrays]
        placed = tuple(jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs))
        (_, got), got_gradients = both(placed)
    pairs = zip(jax.tree.leaves((got, got_gradients)), jax.tree.leaves((out, gradients)))
    worst = max(float(np.abs(np.asarray(x) - y).max() / (1 + np.abs(y).max())) for x, y in pairs)
    return worst, tuple(got.sharding.spec)


PARTS = {name: lambda name=name: _compare(name) for name in CALLS}
