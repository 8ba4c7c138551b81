"""The configurations under which each listed mechanism must keep the laws.

A mechanism joins by being listed: without an entry in VARIANTS it is tested in its default configuration.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

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
    NystromformerConfig,
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
    "nystromformer": {"": NystromformerConfig(num_landmarks=5, conv_size=3)},
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

# Laws 6 and 8 look at compiled programs, not at numbers: one case for each structure of the program. Left out are cases
# whose program is that of another with other constants:
#   local    all patterns go through one loop over blocks, and tests/attention/local/test_local.py looks at the memory
#            of each (test_memory_grows_linearly). For a TPU there are a kernel for windows and one for any pattern.
#   brl      memory per output is a scan over segments, memory per layer all blocks at once; biases go through XLA on a
#            TPU too; scores other than softmax take no running maximum.
#   diag, bsbr, mlr, bilinear_*: variants differ in a pointwise function, a scale, or the ranks.
COMPILED = (
    *(next(name for name in CASES if type(CASES[name]) is kind) for kind in MECHANISMS.values()),
    "local-bigbird",
    "brl-layer",
    "brl-output-equations",
    "brl-layer-laplace",
)

# Variants of a mechanism that run the program of another one with other constants, another pointwise function or other
# ranks. Laws 1, 2 and 4 run them with the slow tests, law 3 runs them always.
SAME_PROGRAM = (
    "diag-softmax",
    "bsbr-compressed",
    "mlr-context",
    "bilinear_mlr-bare",
    "bilinear_btt-rank2",
    "brl-output-relu2",
)

# Remat and 64-bit mode act on the engine that runs the layers, and on the loops inside of them: a stack of independent
# layers on each kind of loop (blocks with a gradient of their own, chunks with a state, tiles of scores, query blocks,
# a dense product), a stack with a carry over segments, and TLinFormer's own.
ENGINES = ("full", "local-sliding", "linear", "mlr", "hopfield", "diag-relu", "brl-output", "tlinformer")

_WINDOW = ("window_attention_forward", "window_attention_backward")
_ANY_PATTERN = (
    "block_attention_forward",
    *(f"block_attention_backward_{part}" for part in ("key", "query", "rest")),
)
_COMPRESS = ("compress_forward", "compress_backward")
_PROPAGATE = ("propagate_forward", "propagate_backward")
# The TPU kernels in the training programs of COMPILED in bfloat16; the others run through XLA there. A segment of BRL's
# with memory per output is short of a window's tiles, so its windows go through the kernel for any pattern.
KERNELS = {
    "local-sliding": _WINDOW,
    "local-bigbird": _ANY_PATTERN,
    "brl-output": (*_ANY_PATTERN, *_COMPRESS, *_PROPAGATE),
    "brl-layer": (*_WINDOW, *_COMPRESS, *_PROPAGATE),
    "brl-output-equations": _ANY_PATTERN,
    "brl-layer-laplace": _WINDOW,
    "bsbr": _ANY_PATTERN,
    "global_window": _WINDOW,
    "tlinformer": _COMPRESS,
}


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


def slow_variants(names: list[str]) -> list[Any]:
    """The names, with those of SAME_PROGRAM marked slow."""
    return slow_unless(names, lambda name: name not in SAME_PROGRAM)


def slow_unless(names: list[str], fast: Any) -> list[Any]:
    """The names, with those for which `fast(name)` is False marked slow."""
    return [name if fast(name) else pytest.param(name, marks=pytest.mark.slow) for name in names]


def named(condition) -> list[str]:
    """Names of the cases whose mechanism fulfils the condition."""
    return [name for name, mechanism in CASES.items() if condition(mechanism)]
