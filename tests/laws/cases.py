"""The configurations under which each listed mechanism must keep the laws.

To add a mechanism, list it: without an entry in VARIANTS it is tested in its default configuration.

A case's field `repeats` decides which of its tests are fast. The fast part of the suite checks causality, generation
and the float32 oracle with its gradients (laws 1 to 3) on every mechanism's first case, and all laws on cases that are
structurally new. The slow part checks every law on every case."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, NamedTuple

import jax.numpy as jnp

from brl_jax.layers import MECHANISMS, Dimensions, Mechanism


class Case(NamedTuple):
    """A configuration that must keep the laws.

    Attributes:
        mechanism: the configuration.
        repeats: the name of a case whose program this one repeats with other constants, another pointwise function or
        other ranks. All its tests are slow, except for laws 1 to 3 if it is its mechanism's first case. None: the case
        is structurally new (it adds a loop, a state or a memory), and its tests are fast."""

    mechanism: Mechanism
    repeats: str | None = None


# Its third block does not see the second.
_MASK = ("1011", "1100", "1010", "0111")

# The paper's beta adds one matrix that the default lacks.
_BRL: dict[str, Any] = {"window": 5, "num_compressed": 3, "block_size": 8, "history_size": None, "beta": 0.5}


def _case(repeats: str | None = None, **fields: Any) -> tuple[str | None, dict[str, Any]]:
    """A case's `repeats`, and its configuration's fields."""
    return repeats, fields


def _brl(repeats: str | None = None, **changes: Any) -> tuple[str | None, dict[str, Any]]:
    return _case(repeats, **_BRL | changes)


VARIANTS: dict[str, dict[str, tuple[str | None, dict[str, Any]]]] = {
    "full": {
        "": _case(),
        "sinks": _case("full", sinks=True, logits_soft_cap=0.5),
        "gate": _case("full", rotary_dim=2, output_gate=True, qk_norm=True),
        "post_norm": _case("full", rotary_dim=0, qk_norm="merged", post_norm=True),
    },
    # tests/attention/local/test_local.py covers each pattern. Causal ones use one loop over blocks; the others add a
    # part that all queries see.
    "local": {
        "sliding": _case(window=5),
        "sinks": _case("local-sliding", window=5, sinks=True, logits_soft_cap=0.5),
        "dilated": _case("local-sliding", window=4, pattern="dilated", dilation=3),
        "block": _case("local-sliding", window=6, pattern="block"),
        "bucketed": _case("local-sliding", window=5, pattern="bucketed"),
        "strided": _case("local-sliding", window=5, pattern="strided"),
        "fixed": _case("local-sliding", window=5, pattern="fixed"),
        "global": _case("local-bigbird", window=5, pattern="global", num_global=3),
        "bigbird": _case(window=4, pattern="bigbird", num_global=4),
        "axial": _case("local-sliding", pattern="axial", grid_width=6),
        "neighbourhood": _case("local-sliding", window=4, pattern="neighbourhood", grid_width=7),
        "block_mask": _case("local-sliding", window=9, pattern="block_mask", block_mask=_MASK),
    },
    "brl": {
        "layer": _brl(),
        # A different program, but a larger one and not the default: slow.
        "output": _brl("brl-layer", memory="output", compress_scale="m1"),
        "output-equations": _brl(
            "brl-output",
            memory="output",
            formulation="equations",
            history_size=13,
            bias="alibi",
            compress_scale="learned",
            compress_positions="none",
        ),
        "layer-neighbourhood": _brl("brl-layer", window=4, pattern="neighbourhood", grid_width=7),
        "layer-fixed": _brl("brl-layer", pattern="fixed"),
        "layer-global": _brl("brl-layer", pattern="global", num_global=3),
        "layer-block_mask": _brl("brl-layer", window=9, pattern="block_mask", block_mask=_MASK),
        "layer-bigbird": _brl("brl-layer", window=4, pattern="bigbird", num_global=4),
        "layer-equations": _brl("brl-layer", formulation="equations", history_size=5, phi="spiky"),
        "output-relu2": _brl(
            "brl-output",
            memory="output",
            score="relu2",
            gamma=0.0,
            history_size=11,
            input_norm=False,
            compressed_dim=24,
        ),
        "layer-laplace": _brl(
            "brl-layer",
            score="laplace",
            gamma=0.5,
            bias="t5",
            compress_positions="none",
            history_size=24,
            beta=0.0,
        ),
    },
    "diag": {"relu": _case(block_size=6, score="relu"), "softmax": _case("diag-relu", block_size=6)},
    "linformer": {"": _case(num_projected=5, max_length=32)},
    "nystromformer": {"": _case(num_landmarks=5, conv_size=3)},
    "skyformer": {"": _case("nystromformer", num_samples=6)},
    # Ranks are equal because both directions are tested with one set of parameters.
    "long_short": {"": _case(window=5, num_projected=2, chunk_size=6, chunk_rank=2)},
    "hopfield": {"": _case(steps=2, beta=1.0)},
    "kernelized": {"": _case("hopfield")},
    "synthesizer": {
        "": _case("hopfield", rank=3, max_length=32),
        "dense": _case("synthesizer", weights="dense", max_length=32),
    },
    "informer": {"": _case(factor=1)},
    # The last of a row's 27 tokens have four blocks to select two from; compressed blocks overlap.
    "native_sparse": {"": _case(window=5, compressed_size=4, stride=2, selected_size=4, num_selected=5)},
    "reformer": {"": _case(num_rounds=2, num_buckets=4, chunk_size=2)},
    # Dense products without a loop over tokens, like Nystromformer's; tests/attention has a fast test of padding.
    "sinkhorn": {"": _case("nystromformer", block_size=5, max_length=32, iterations=3)},
    "sliceformer": {
        "": _case(order="interleaved"),
        "ascending": _case("sliceformer"),
        "max_exchange": _case("sliceformer", order="max_exchange"),
    },
    "linear": {"": _case(chunk_size=8)},
    "deltanet": {"": _case(chunk_size=8), "plain": _case("deltanet", chunk_size=8, conv_size=0)},
    # Two value heads share a key head; tests/attention covers convolutions over packed rows and the decays.
    "gated_deltanet": {
        "": _case("deltanet", chunk_size=8),
        "sizes": _case(
            "gated_deltanet",
            num_key_heads=1,
            num_value_heads=3,
            key_dim=6,
            value_dim=5,
            negative_eigenvalues=True,
            norm_epsilon=0.1,
            conv_size=2,
        ),
    },
    "kda": {"": _case("gated_deltanet", chunk_size=4)},
    "gated_deltanet_2": {"": _case("kda", chunk_size=4, gate_rank=3)},
    "rwkv7": {"": _case(chunk_size=4, rank=3)},
    "retnet": {"": _case("linear", chunk_size=8)},
    # Decays from about 1/2 to 1/1000 per token; by default they are near 1.
    "gla": {
        "": _case("linear", key_dim=4, temperature=0.2, gate_rank=3, chunk_size=8),
        "weak": _case("gla", gate_rank=3, chunk_size=16),
    },
    "mamba2": {"": _case("linear", state_size=6, num_groups=2, conv_size=3, chunk_size=8)},
    "norm": {"": _case("linear", feature_map="elu", norm="layer", chunk_size=8)},
    # Near max_length=40, ReLU leaves one row here with a single key, by less than bfloat16's rounding.
    "cosformer": {"": _case("linear", max_length=48, chunk_size=8)},
    "gau": {"": _case(key_dim=8, chunk_size=8)},
    "flash": {"": _case("gau", key_dim=8, chunk_size=8)},
    "flowformer": {"": _case(chunk_size=8)},
    # Two linear attentions, one after the other; laws 1 to 3 and the tests of states cover its packed tokens and count.
    "luna": {"": _case("linear", num_packed=3, chunk_size=8)},
    "bsbr": {"": _case(chunk_size=6), "compressed": _case("bsbr", chunk_size=8, num_compressed=5)},
    "mlr": {
        "": _case(ranks=(2, 1, 1), block_sizes=(None, 8, 4)),
        "context": _case("mlr", ranks=(2, 2), context=16, score_scale=2.0, qk_norm=False),
    },
    "bilinear_mlr": {
        "": _case(),
        "bare": _case("bilinear_mlr", ranks=(3, 1), normalize=False, limit_weights=False, score_scale=2.0),
    },
    "bilinear_btt": {
        "": _case("bilinear_mlr"),
        "rank2": _case("bilinear_btt", rank=2, normalize=False, score_scale=0.5),
    },
    "global_window": {
        "": _case(window=5, ranks=(1, 3)),
        "scale": _case("global_window", window=5, ranks=(3, 1), score_scale=1.5, qk_norm=True),
    },
    "performer": {"": _case("linear", num_features=6, chunk_size=8)},
    "tlinformer": {"": _case(window=8, context=5, hidden=1)},
}

_LISTED: dict[str, Case] = {
    "-".join(filter(None, (name, variant))): Case(MECHANISMS[name](**fields), repeats)
    for name in MECHANISMS
    for variant, (repeats, fields) in VARIANTS.get(name, {"": _case()}).items()
}
CASES: dict[str, Mechanism] = {name: case.mechanism for name, case in _LISTED.items()}

# The first case of each mechanism, and the cases that are structurally new.
LEADING = tuple(next(name for name in CASES if type(CASES[name]) is kind) for kind in MECHANISMS.values())
NEW = tuple(name for name, case in _LISTED.items() if case.repeats is None)

# Laws 6 and 8 check compiled programs, not numbers, so one case per program structure is enough. BRL's other scores
# than softmax need no running maximum, and on a TPU its biases go through XLA too.
COMPILED = (*dict.fromkeys((*LEADING, *NEW)), "brl-output", "brl-output-equations", "brl-layer-laplace")

# Remat, `vmap`, and 64-bit mode affect the engine that runs the layers and the loops inside them: a stack of
# independent layers on each kind of loop (blocks with a custom gradient, chunks with a state, tiles of scores, query
# blocks, a dense product), a stack with a carry over segments, and TLinFormer's engine.
ENGINES = ("full", "local-sliding", "linear", "mlr", "hopfield", "diag-relu", "brl-output", "tlinformer")
# The engines with fast tests: a loop without a state, and one with a state.
FAST_ENGINES = ("local-sliding", "linear")
# The fast cases of law 6, since compiling for 32k tokens takes seconds: a state and blocks.
FAST_MEMORY = ("linear", "diag-relu")

_WINDOW = ("window_attention_forward", "window_attention_backward")
_ANY_PATTERN = ("block_attention_forward", "block_attention_backward_all")
_COMPRESS = ("compress_forward", "compress_backward")
_PROPAGATE = ("propagate_forward", "propagate_backward")
_RECURRENT = ("recurrent_forward", "recurrent_backward")
# The TPU kernels in the training programs of COMPILED in bfloat16; the others use XLA there. Segments of BRL with
# memory per output are too short for a window's tiles, so its windows use the kernel for any pattern.
KERNELS = {
    "local-sliding": _WINDOW,
    "local-bigbird": _ANY_PATTERN,
    "brl-output": (*_ANY_PATTERN, *_COMPRESS, *_PROPAGATE),
    "brl-layer": (*_WINDOW, *_COMPRESS, *_PROPAGATE),
    "brl-output-equations": (*_ANY_PATTERN, *_COMPRESS, *_PROPAGATE),
    "brl-layer-laplace": (*_WINDOW, *_COMPRESS, *_PROPAGATE),
    "bsbr": _ANY_PATTERN,
    "global_window": _WINDOW,
    "native_sparse": (*_ANY_PATTERN, *_WINDOW),
    "tlinformer": _COMPRESS,
    "full": _ANY_PATTERN,
    "hopfield": _ANY_PATTERN,
    **dict.fromkeys(
        ("linear", "norm", "cosformer", "deltanet", "gated_deltanet", "kda", "retnet", "gla", "mamba2"),
        _RECURRENT,
    ),
}

# The fast cases of law 8: each kernel once, and a program without one.
FAST_KERNELS = ("diag-relu", "local-sliding", "local-bigbird", "brl-layer", "linear")

# The laws that `pytest -m gpu` runs with the kernels of pallas_kernels/triton, and a slow test interprets. Mechanisms
# for each operation: local attention and gated attention units in a decoder, compress and propagate in an
# encoder, compress by blocks in a decoder, native sparse attention, and each kind of recurrence.
ON_GPU_KERNELS = (
    "law_1_causal[local-sinks]",
    "law_1_causal[gau]",
    "law_2_generation_is_training[local-sinks]",
    "law_3_oracle[local-sinks-causal]",
    "law_3_oracle[gau-causal]",
    "law_3_oracle[native_sparse-causal]",
    "law_3_oracle[linear-causal]",
    "law_3_oracle[mamba2-causal]",
    "law_3_oracle[gla-causal]",
    "law_3_oracle[deltanet-causal]",
    "law_3_oracle[gated_deltanet-causal]",
    "law_3_oracle[kda-causal]",
    "law_3_oracle[brl-output-bidirectional]",
    "law_3_oracle[brl-output-causal]",
    "law_4_packing[local-sinks]",
    "law_4_packing[gau]",
    "law_4_packing[native_sparse]",
    "law_4_packing[gated_deltanet]",
    "law_4_padding[brl-output]",
)


def dimensions(is_causal: bool, **changes) -> Dimensions:
    """A small network: 4 query heads of size 4 on 2 key/value heads.

    Only through XLA: including the TPU kernels would double the time, and law 8 tests them. tests/support/gpu.py sets
    BRL_JAX_LAWS_IMPLEMENTATION for `ON_GPU_KERNELS`."""
    standard = Dimensions(
        d_model=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        d_ff=24,
        is_causal=is_causal,
        dtype=jnp.float32,
        implementation=os.environ.get("BRL_JAX_LAWS_IMPLEMENTATION", "xla"),
    )
    return dataclasses.replace(standard, **changes)


def named(condition) -> list[str]:
    """Names of the cases whose mechanism satisfies the condition."""
    return [name for name, mechanism in CASES.items() if condition(mechanism)]
