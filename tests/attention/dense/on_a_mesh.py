"""Full attention on a mesh that cuts queries over four of eight devices; asked for by test_on_a_mesh.py.

Through XLA: Pallas cannot interpret a kernel that reads scalars inside `jax.shard_map`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from brl_jax.attention.dense import sharded
from brl_jax.attention.dense.full import MANY_TOKENS, full_attention
from brl_jax.attention.dense.hopfield import hopfield_attention
from brl_jax.attention.dense.on_mesh import dense_on_mesh
from brl_jax.sharding import MeshConfig, make_mesh
from tests.support.attention import random_qkv

LENGTH = MANY_TOKENS


def run(is_causal, function=full_attention, around=None, **options):
    """Output and gradients on one device and on the mesh."""
    *arrays, d_out = random_qkv(LENGTH, batch=2)
    ids = jnp.asarray(np.sort(np.random.default_rng(3).integers(0, 3, (2, LENGTH))))
    lengths = jnp.array([LENGTH - 10, LENGTH])

    def both(attend):
        options = {"is_causal": is_causal, "segment_ids": ids, "key_value_seq_lengths": lengths}

        @jax.jit
        def program(arrays, d_out):
            out, pull = jax.vjp(lambda *x: attend(*x, **options), *arrays)
            return out, *pull(d_out)

        return [np.asarray(x) for x in program(arrays, d_out)]

    expected = both(functools.partial(function, implementation="xla", **options))
    if around is not None:
        options |= {"function": function, "around": around}
    on_mesh = functools.partial(dense_on_mesh, **options)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=1, sequence=4))):
        return expected, both(on_mesh)


PARTS = {
    "causal": functools.partial(run, True),
    "both ways, sinks": functools.partial(run, False, sinks=jnp.array([0.5, -1.0, 2.0, 0.0])),
    "hopfield": functools.partial(
        run,
        True,
        functools.partial(hopfield_attention, steps=2),
        functools.partial(sharded.hopfield_attention, steps=2),
    ),
}
