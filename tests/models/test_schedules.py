"""Schedules of mechanisms over layers: which layer gets which, and networks that mix mechanisms."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import BRLConfig, DiagConfig, FullConfig, LocalConfig, NormConfig
from brl_jax.layers.core.side_by_side import SideBySideConfig
from brl_jax.models import DecoderConfig, DecoderLM, StackConfig
from tests.laws.cases import dimensions
from tests.marks import slow_unless
from tests.support.generation import in_pieces
from tests.support.numbers import relative_error
from tests.support.parameters import drawn

A, B = DiagConfig(block_size=4), FullConfig()
BOTH = {"mechanism": A, "late_mechanism": B}


def layers(num_layers, **options):
    """The kinds of the layers, a for A and b for B."""
    mechanisms = StackConfig(num_layers=num_layers, **options).mechanisms
    return "".join(
        {A: "a", B: "b", SideBySideConfig(A, B): "p", SideBySideConfig(B, A): "q"}[m] for m in mechanisms
    )


@pytest.mark.parametrize(
    ("num_layers", "options", "expected"),
    [
        (3, {"mechanism": A}, "aaa"),
        (5, BOTH, "aaabb"),
        (6, BOTH | {"early_layers": 0}, "bbbbbb"),
        (6, BOTH | {"early_layers": 2}, "aabbbb"),
        (6, BOTH | {"early_layers": 6}, "aaaaaa"),
        (6, BOTH | {"early_layers": 2, "swap_mechanisms": True}, "bbaaaa"),
        (5, BOTH | {"schedule": "alternate"}, "ababa"),
        (4, BOTH | {"schedule": "alternate", "swap_mechanisms": True}, "baba"),
        (6, BOTH | {"schedule": "alternate", "early_layers": 2}, "aabaab"),
        (2, BOTH | {"schedule": "parallel"}, "pp"),
        (2, BOTH | {"schedule": "parallel", "swap_mechanisms": True}, "qq"),
    ],
)
def test_which_layer_gets_which(num_layers, options, expected):
    assert layers(num_layers, **options) == expected


LOCAL = LocalConfig(window=3)
BRL = BRLConfig(window=3, num_compressed=2, block_size=8, memory="output")
NETWORKS = {
    "split": {"mechanism": A, "late_mechanism": LOCAL, "ffn": "swiglu"},
    "split-brl": {"mechanism": BRL, "late_mechanism": A},
    "alternate": {"mechanism": LOCAL, "late_mechanism": B, "schedule": "alternate", "early_layers": 2},
    "parallel": {**BOTH, "schedule": "parallel", "ffn": "relu", "norm": "rms"},
    "transnormer": {
        "mechanism": DiagConfig(4, "relu"),
        "late_mechanism": NormConfig(feature_map="elu"),
        "ffn": "swiglu",
    },
}

# One program is enough for a network that splits its input into segments anyway.
SIZES = {"split-brl": (7, 7, 7)}


@pytest.mark.parametrize("name", slow_unless(NETWORKS, ("alternate", "parallel", "transnormer")))
def test_generation_is_training(name):
    """Prefill and steps through caches of several kinds give the logits of the whole text at once."""
    config = DecoderConfig(num_layers=3, d_model=16, num_heads=2, d_ff=24, vocab_size=11, **NETWORKS[name])
    model = DecoderLM(config)
    tokens = jax.random.randint(jax.random.key(0), (2, 21), 0, 11)
    variables = drawn(model.init, tokens)
    run = jax.jit(lambda params: model.apply({"params": params}, tokens)[0])
    expected = run(variables["params"])
    logits, _ = in_pieces(model, variables, tokens, SIZES.get(name, (6, 1, 1, 6, 1, 6)))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    # Each kind of layer affects the result.
    stack = variables["params"]["stack"]
    groups = [group for group in stack if group.startswith("layers")]
    assert len(groups) == (1 if name == "parallel" else 2)
    for group in groups:
        without = stack | {group: jax.tree.map(jnp.zeros_like, stack[group])}
        assert relative_error(run(variables["params"] | {"stack": without}), expected) > 1e-2


def test_parallel_is_one_projection_of_both():
    """The heads of both, concatenated and multiplied by one matrix of twice the height; each layer holds half of it."""
    d = dimensions(True)
    layer = SideBySideConfig(A, B).layer(d)
    x = jax.random.normal(jax.random.key(0), (2, 9, 16))
    params = drawn(layer.init, x)["params"]
    heads = []
    for name, mechanism in (("first", A), ("second", B)):
        # With an identity projection, a layer returns its merged heads.
        own = {**params[name], "out": {"kernel": jnp.eye(16).reshape(4, 4, 16)}}
        heads.append(mechanism.layer(d).apply({"params": own}, x)[0])
    matrix = jnp.concatenate([params[name]["out"]["kernel"].reshape(16, 16) for name in ("first", "second")])
    expected = jnp.concatenate(heads, axis=-1) @ matrix
    assert relative_error(layer.apply({"params": params}, x)[0], expected) < 1e-5


def test_parallel_starts_as_one_projection_would():
    """The joint output matrix has the variance for its doubled fan-in."""
    d = dataclasses.replace(dimensions(True), d_model=128, num_heads=4, num_kv_heads=4, head_dim=32)
    kernel = nn.unbox(jax.jit(SideBySideConfig(A, B).layer(d).init)(jax.random.key(0), jnp.ones((1, 2, 128))))
    deviation = float(jnp.std(kernel["params"]["first"]["out"]["kernel"]))
    assert deviation == pytest.approx((1 / 256) ** 0.5, rel=0.05)
