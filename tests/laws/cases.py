"""The configurations under which each listed mechanism must keep the laws.

A mechanism joins by being listed: without an entry in VARIANTS it is tested in its default configuration.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from brl_jax.layers import (
    MECHANISMS,
    BilinearBTTConfig,
    BilinearMLRConfig,
    BRLConfig,
    BSBRConfig,
    CosformerConfig,
    DeltaNetConfig,
    DiagConfig,
    Dimensions,
    FlashConfig,
    FullConfig,
    GauConfig,
    GlobalWindowConfig,
    HopfieldConfig,
    LinearConfig,
    LinformerConfig,
    LocalConfig,
    Mechanism,
    MLRConfig,
    NormConfig,
    PerformerConfig,
    TLinFormerConfig,
)

_BRL = BRLConfig(window=5, num_compressed=3, block_size=8)


def _brl(**changes) -> Mechanism:
    return dataclasses.replace(_BRL, **changes)


VARIANTS: dict[str, dict[str, Mechanism]] = {
    "full": {"": FullConfig()},
    "local": {
        "sliding": LocalConfig(window=5),
        "dilated": LocalConfig(window=4, pattern="dilated", dilation=3),
        "block": LocalConfig(window=6, pattern="block"),
        "bucketed": LocalConfig(window=5, pattern="bucketed"),
        "strided": LocalConfig(window=5, pattern="strided"),
        "fixed": LocalConfig(window=5, pattern="fixed"),
        "global": LocalConfig(window=5, pattern="global", num_global=3),
        "bigbird": LocalConfig(window=4, pattern="bigbird", num_global=4),
    },
    "brl": {
        "output": _brl(compress_scale="m1"),
        "layer": _brl(memory="layer"),
        "output-equations": _brl(
            formulation="equations", history_size=13, bias="alibi", compress_scale="learned"
        ),
        "layer-equations": _brl(memory="layer", formulation="equations", history_size=5, phi="spiky"),
        "output-relu2": _brl(score="relu2", gamma=0.0, history_size=11, input_norm=False, compressed_dim=24),
        "layer-laplace": _brl(
            memory="layer",
            score="laplace",
            gamma=0.5,
            bias="t5",
            history_size=24,
            beta=0.0,
        ),
    },
    "diag": {
        "relu": DiagConfig(block_size=6, score="relu"),
        "softmax": DiagConfig(block_size=6),
    },
    "linformer": {"": LinformerConfig(num_projected=5, max_length=32)},
    "hopfield": {"": HopfieldConfig(steps=2, beta=1.0)},
    "linear": {
        "": LinearConfig(chunk_size=8),
    },
    "deltanet": {"": DeltaNetConfig(chunk_size=8)},
    "norm": {"": NormConfig(feature_map="elu", norm="layer", chunk_size=8)},
    # Near max_length=40 one row of ours has a single key left by ReLU, by less than bfloat16's rounding.
    "cosformer": {"": CosformerConfig(max_length=48, chunk_size=8)},
    "gau": {"": GauConfig(key_dim=8, chunk_size=8)},
    "flash": {"": FlashConfig(key_dim=8, chunk_size=8)},
    "bsbr": {"": BSBRConfig(chunk_size=6), "compressed": BSBRConfig(chunk_size=8, compressed=5)},
    "mlr": {
        "": MLRConfig(ranks=(2, 1, 1), block_sizes=(None, 8, 4)),
        "context": MLRConfig(ranks=(2, 2), context=16, divide_by_levels=True, score_scale=2.0, qk_norm=False),
    },
    "bilinear_mlr": {
        "": BilinearMLRConfig(),
        "bare": BilinearMLRConfig(ranks=(3, 1), normalize=False, limit_weights=False),
    },
    "bilinear_btt": {
        "": BilinearBTTConfig(),
        "rank2": BilinearBTTConfig(rank=2, normalize=False, score_scale=0.5),
    },
    "global_window": {"": GlobalWindowConfig(window=4, ranks=(1, 3), score_scale=1.5)},
    "performer": {"": PerformerConfig(num_features=6, chunk_size=8)},
    "tlinformer": {"": TLinFormerConfig(window=8, context=5, hidden=1)},
}

CASES: dict[str, Mechanism] = {
    "-".join(filter(None, (name, variant))): mechanism
    for name in MECHANISMS
    for variant, mechanism in VARIANTS.get(name, {"": MECHANISMS[name]()}).items()
}

# The mechanisms in which `local_attention` or `compress` is, which have kernels for TPUs.
KERNELS = ("local", "brl", "bsbr", "global_window", "tlinformer")


def dimensions(is_causal: bool, **changes) -> Dimensions:
    """A small network: 4 query heads of 4 on 2 key/value heads.

    XLA's alone, which is what runs here in any case: following the TPU's kernels too takes as long again. Law 8 is
    theirs.
    """
    standard = Dimensions(
        d_model=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        d_ff=24,
        is_causal=is_causal,
        dtype=jnp.float32,
        implementation="xla",
    )
    return dataclasses.replace(standard, **changes)


def named(condition) -> list[str]:
    """Names of the cases whose mechanism fulfils the condition."""
    return [name for name, mechanism in CASES.items() if condition(mechanism)]
