"""Law 8, second half: training compiles for real TPU chips on a host without one (needs the package libtpu)."""

from __future__ import annotations

import importlib.util
import json

import pytest

from brl_jax.layers import MECHANISMS
from tests.laws.cases import CASES
from tests.support.processes import python

# The first case of each mechanism, and BRL's other memory.
NAMES = [next(name for name in CASES if type(CASES[name]) is kind) for kind in MECHANISMS.values()] + [
    "brl-layer"
]
CHIPS = {"v5e": "v5e:2x2", "7x": "tpu7x:2x2x1"}

PROGRAM = """
import dataclasses, json, sys
import flax.linen as nn, jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from brl_jax.models import make_stack
from tests.laws.cases import CASES, KERNELS, dimensions

chip = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices[0]
sizes = {}
for name in sys.argv[2:]:
    known = {field.name for field in dataclasses.fields(CASES[name])}
    changes = {"window": 128, "num_compressed": 64, "block_size": 256, "num_projected": 128, "max_length": 1024}
    changes |= {"context": 64 if name == "tlinformer" else 1024, "ranks": None, "block_sizes": None}
    mechanism = dataclasses.replace(CASES[name], **{k: v for k, v in changes.items() if k in known})
    size = {"d_model": 256, "head_dim": 64, "num_kv_heads": 4, "d_ff": 256}
    d = dimensions(mechanism.causal, dtype=jnp.bfloat16, implementation=None, **size)
    stack = make_stack((mechanism,) * (2 * mechanism.group), d)
    x = jax.ShapeDtypeStruct((1, 1024, 256), jnp.bfloat16, sharding=SingleDeviceSharding(chip))
    variables = jax.eval_shape(lambda key: nn.unbox(stack.init(key, jnp.zeros(x.shape, x.dtype))), jax.random.key(0))
    place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=x.sharding)
    step = jax.jit(jax.grad(lambda v, x: stack.apply(v, x)[0].astype(jnp.float32).sum()))
    compiled = step.lower(jax.tree.map(place, variables), x).compile()
    sizes[name] = compiled.memory_analysis().temp_size_in_bytes
    text = compiled.as_text()
    assert ("tpu_custom_call" in text) == (name in KERNELS), name
    kernels = {"brl": ("compress", "propagate"), "tlinformer": ("compress",)}.get(name.split("-")[0], ())
    missing = [k + p for k in kernels for p in ("_forward", "_backward") if k + p not in text]
    assert not missing, (name, missing)
print(json.dumps(sizes))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install '.[tpu]'"
)
@pytest.mark.parametrize("chip", CHIPS)
def test_law_8_compiles_for_tpu(chip):
    """Forward and backward of each kind of mechanism compile with their Pallas kernels."""
    done = python("-c", PROGRAM, CHIPS[chip], *NAMES, TPU_SKIP_MDS_QUERY="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(json.loads(done.stdout.splitlines()[-1])) == set(NAMES)
