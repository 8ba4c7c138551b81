"""The configurations under which each listed mechanism must keep the laws.

To add a mechanism, list it: without an entry in VARIANTS it is tested in its default configuration.

A case's field `repeats` decides which of its tests are fast. The fast part of the suite checks causality, generation
and the float32 oracle with its gradients (laws 1 to 3) on every mechanism's first case, and all laws on cases that are
structurally new. The slow part checks every law on every case."""

from __future__ import annotations

import dataclasses
import os
from typing import NamedTuple

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
    FlowformerConfig,
    FullConfig,
    GatedDeltaNet2Config,
    GatedDeltaNetConfig,
    GAUConfig,
    GLAConfig,
    GlobalWindowConfig,
    HopfieldConfig,
    InformerConfig,
    KDAConfig,
    KernelizedConfig,
    LinearConfig,
    LinformerConfig,
    LocalConfig,
    LongShortConfig,
    LunaConfig,
    Mamba2Config,
    Mechanism,
    MLRConfig,
    NativeSparseConfig,
    NormConfig,
    NystromformerConfig,
    PerformerConfig,
    ReformerConfig,
    RetNetConfig,
    RWKV7Config,
    SinkhornConfig,
    SkyformerConfig,
    SliceformerConfig,
    SynthesizerConfig,
    TLinFormerConfig,
)


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
_BRL = BRLConfig(window=5, num_compressed=3, block_size=8, history_size=None, beta=0.5)


def _brl(repeats: str | None = None, **changes) -> Case:
    return Case(dataclasses.replace(_BRL, **changes), repeats)


VARIANTS: dict[str, dict[str, Case]] = {
    "full": {
        "": Case(FullConfig()),
        "sinks": Case(FullConfig(sinks=True, logits_soft_cap=0.5), repeats="full"),
        "gate": Case(FullConfig(rotary_dim=2, output_gate=True, qk_norm=True), repeats="full"),
        "post_norm": Case(FullConfig(rotary_dim=0, qk_norm="merged", post_norm=True), repeats="full"),
    },
    # tests/attention/local/test_local.py covers each pattern. Causal ones use one loop over blocks; the others add a
    # part that all queries see.
    "local": {
        "sliding": Case(LocalConfig(window=5)),
        "sinks": Case(LocalConfig(window=5, sinks=True, logits_soft_cap=0.5), repeats="local-sliding"),
        "dilated": Case(LocalConfig(window=4, pattern="dilated", dilation=3), repeats="local-sliding"),
        "block": Case(LocalConfig(window=6, pattern="block"), repeats="local-sliding"),
        "bucketed": Case(LocalConfig(window=5, pattern="bucketed"), repeats="local-sliding"),
        "strided": Case(LocalConfig(window=5, pattern="strided"), repeats="local-sliding"),
        "fixed": Case(LocalConfig(window=5, pattern="fixed"), repeats="local-sliding"),
        "global": Case(LocalConfig(window=5, pattern="global", num_global=3), repeats="local-bigbird"),
        "bigbird": Case(LocalConfig(window=4, pattern="bigbird", num_global=4)),
        "global_local": Case(
            LocalConfig(window=5, pattern="global_local", num_global=3, global_segment=7),
            repeats="local-bigbird",
        ),
        "axial": Case(LocalConfig(pattern="axial", grid_width=6), repeats="local-sliding"),
        "neighbourhood": Case(
            LocalConfig(window=4, pattern="neighbourhood", grid_width=7), repeats="local-sliding"
        ),
        "block_mask": Case(
            LocalConfig(window=9, pattern="block_mask", block_mask=_MASK), repeats="local-sliding"
        ),
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
        "layer-global_local": _brl("brl-layer", pattern="global_local", num_global=3, global_segment=7),
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
    "diag": {
        "relu": Case(DiagConfig(block_size=6, score="relu")),
        "softmax": Case(DiagConfig(block_size=6), repeats="diag-relu"),
    },
    "linformer": {"": Case(LinformerConfig(num_projected=5, max_length=32))},
    "nystromformer": {"": Case(NystromformerConfig(num_landmarks=5, conv_size=3))},
    "skyformer": {"": Case(SkyformerConfig(num_samples=6), repeats="nystromformer")},
    # Ranks are equal because both directions are tested with one set of parameters.
    "long_short": {"": Case(LongShortConfig(window=5, num_projected=2, chunk_size=6, chunk_rank=2))},
    "hopfield": {"": Case(HopfieldConfig(steps=2, beta=1.0))},
    "kernelized": {"": Case(KernelizedConfig(), repeats="hopfield")},
    "synthesizer": {
        "": Case(SynthesizerConfig(rank=3, max_length=32), repeats="hopfield"),
        "dense": Case(SynthesizerConfig("dense", max_length=32), repeats="synthesizer"),
    },
    "informer": {"": Case(InformerConfig(factor=1))},
    # The last of a row's 27 tokens have four blocks to select two from; compressed blocks overlap.
    "native_sparse": {
        "": Case(NativeSparseConfig(window=5, compressed_size=4, stride=2, selected_size=4, num_selected=5)),
    },
    "reformer": {"": Case(ReformerConfig(num_rounds=2, num_buckets=4, chunk_size=2))},
    # Dense products without a loop over tokens, like Nystromformer's; tests/attention has a fast test of padding.
    "sinkhorn": {
        "": Case(SinkhornConfig(block_size=5, max_length=32, iterations=3), repeats="nystromformer")
    },
    "sliceformer": {
        "": Case(SliceformerConfig(order="interleaved")),
        "ascending": Case(SliceformerConfig(), repeats="sliceformer"),
        "max_exchange": Case(SliceformerConfig(order="max_exchange"), repeats="sliceformer"),
    },
    "linear": {
        "": Case(LinearConfig(chunk_size=8)),
    },
    "deltanet": {
        "": Case(DeltaNetConfig(chunk_size=8)),
        "plain": Case(DeltaNetConfig(chunk_size=8, conv_size=0), repeats="deltanet"),
    },
    # Two value heads share a key head; tests/attention covers convolutions over packed rows and the decays.
    "gated_deltanet": {
        "": Case(GatedDeltaNetConfig(chunk_size=8), repeats="deltanet"),
        "sizes": Case(
            GatedDeltaNetConfig(
                num_key_heads=1,
                num_value_heads=3,
                key_dim=6,
                value_dim=5,
                negative_eigenvalues=True,
                norm_epsilon=0.1,
                conv_size=2,
            ),
            repeats="gated_deltanet",
        ),
    },
    "kda": {"": Case(KDAConfig(chunk_size=4), repeats="gated_deltanet")},
    "gated_deltanet_2": {"": Case(GatedDeltaNet2Config(chunk_size=4, gate_rank=3), repeats="kda")},
    "rwkv7": {"": Case(RWKV7Config(chunk_size=4, rank=3))},
    "retnet": {"": Case(RetNetConfig(chunk_size=8), repeats="linear")},
    # Decays from about 1/2 to 1/1000 per token; by default they are near 1.
    "gla": {
        "": Case(GLAConfig(key_dim=4, temperature=0.2, gate_rank=3, chunk_size=8), repeats="linear"),
        "weak": Case(GLAConfig(gate_rank=3, chunk_size=16), repeats="gla"),
    },
    "mamba2": {
        "": Case(Mamba2Config(state_size=6, num_groups=2, conv_size=3, chunk_size=8), repeats="linear")
    },
    "norm": {"": Case(NormConfig(feature_map="elu", norm="layer", chunk_size=8), repeats="linear")},
    # Near max_length=40, ReLU leaves one row here with a single key, by less than bfloat16's rounding.
    "cosformer": {"": Case(CosformerConfig(max_length=48, chunk_size=8), repeats="linear")},
    "gau": {"": Case(GAUConfig(key_dim=8, chunk_size=8))},
    "flash": {"": Case(FlashConfig(key_dim=8, chunk_size=8), repeats="gau")},
    "flowformer": {"": Case(FlowformerConfig(chunk_size=8))},
    # Two linear attentions, one after the other; laws 1 to 3 and the tests of states cover its packed tokens and count.
    "luna": {"": Case(LunaConfig(num_packed=3, chunk_size=8), repeats="linear")},
    "bsbr": {
        "": Case(BSBRConfig(chunk_size=6)),
        "compressed": Case(BSBRConfig(chunk_size=8, num_compressed=5), "bsbr"),
    },
    "mlr": {
        "": Case(MLRConfig(ranks=(2, 1, 1), block_sizes=(None, 8, 4))),
        "context": Case(
            MLRConfig(ranks=(2, 2), context=16, score_scale=2.0, qk_norm=False),
            repeats="mlr",
        ),
    },
    "bilinear_mlr": {
        "": Case(BilinearMLRConfig()),
        "bare": Case(
            BilinearMLRConfig(ranks=(3, 1), normalize=False, limit_weights=False), repeats="bilinear_mlr"
        ),
    },
    "bilinear_btt": {
        "": Case(BilinearBTTConfig(), repeats="bilinear_mlr"),
        "rank2": Case(BilinearBTTConfig(rank=2, normalize=False, score_scale=0.5), repeats="bilinear_btt"),
    },
    "global_window": {
        "": Case(GlobalWindowConfig(window=5, ranks=(1, 3))),
        "scale": Case(
            GlobalWindowConfig(window=5, ranks=(3, 1), score_scale=1.5, qk_norm=True), repeats="global_window"
        ),
    },
    "performer": {"": Case(PerformerConfig(num_features=6, chunk_size=8), repeats="linear")},
    "tlinformer": {"": Case(TLinFormerConfig(window=8, context=5, hidden=1))},
}

_LISTED: dict[str, Case] = {
    "-".join(filter(None, (name, variant))): case
    for name in MECHANISMS
    for variant, case in VARIANTS.get(name, {"": Case(MECHANISMS[name]())}).items()
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
_ANY_PATTERN = (
    "block_attention_forward",
    *(f"block_attention_backward_{part}" for part in ("key", "query", "rest")),
)
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
