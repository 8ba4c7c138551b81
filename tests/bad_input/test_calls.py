"""Bad calls of the public functions, configurations and networks.

Each row is a call that a user could make by mistake and a pattern that the error must match, including the argument's
name. A NaN, a result or an error from inside JAX fails the row."""

import dataclasses
import inspect
import math
import types
import typing

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import PRNGKeyArray

import brl_jax as brl

B, T, N, H = 2, 12, 4, 8
RNG = np.random.default_rng(0)


def array(*shape, dtype=np.float32):
    return jnp.asarray(RNG.normal(size=shape), dtype)


Q, K, V = (array(B, T, N, H) for _ in range(3))
GROUPED = array(B, T, 3, H)
SHORT = array(B, T - 1, N, H)
NARROW = array(B, T, N, H - 2)
HALF = Q.astype(jnp.bfloat16)
INTS = jnp.ones((B, T, N, H), jnp.int32)
LENGTHS = jnp.asarray([3, 12])
WINDOW = {"local_window_size": 3}
TOKENS = array(B, 5, N, H)
BETA = jnp.full((B, T, N), 0.5)
PROJECTION = array(4, 32)
MLR = {"ranks": (4, 4), "block_sizes": (None, 4)}

SOFTMAX = {
    "full": lambda q=Q, k=K, v=V, **o: brl.full_attention(q, k, v, **o),
    "local": lambda q=Q, k=K, v=V, **o: brl.local_attention(q, k, v, **WINDOW, **o),
    "diag": lambda q=Q, k=K, v=V, **o: brl.diag_attention(q, k, v, **o),
    "mlr": lambda q=Q, k=K, v=V, **o: brl.mlr_attention(q, k, v, **MLR, **o),
    "hopfield": lambda q=Q, k=K, v=V, **o: brl.hopfield_attention(q, k, v, **o),
    "linear": lambda q=Q, k=K, v=V, **o: brl.linear_attention(q, k, v, **o),
    "norm": lambda q=Q, k=K, v=V, **o: brl.norm_attention(q, k, v, **o),
    "cosformer": lambda q=Q, k=K, v=V, **o: brl.cosformer_attention(q, k, v, max_length=64, **o),
    "gau": lambda q=Q, k=K, v=V, **o: brl.gau_attention(q, k, v, **o),
    "delta": lambda q=Q, k=K, v=V, **o: brl.delta_rule(q, k, v, beta=BETA, **o),
    "performer": lambda q=Q, k=K, v=V, **o: brl.performer_attention(
        q, k, v, rng=jax.random.key(0), num_features=16, **o
    ),
    "bsbr": lambda q=Q, k=K, v=V, **o: brl.bsbr_attention(q, k, v, q, k, **o),
    "linformer": lambda q=Q, k=K, v=V, **o: brl.linformer_attention(
        q, k, v, key_projection=PROJECTION, value_projection=PROJECTION, **o
    ),
    "flowformer": lambda q=Q, k=K, v=V, **o: brl.flowformer_attention(q, k, v, **o),
    "luna": lambda q=Q, k=K, v=V, **o: brl.luna_attention(q, k, v, array(3, N, H), **o),
    "informer": lambda q=Q, k=K, v=V, **o: brl.informer_attention(q, k, v, rng=jax.random.key(0), **o),
    "kernelized": lambda q=Q, k=K, v=V, **o: brl.kernelized_attention(q, k, v, **o),
    "skyformer": lambda q=Q, k=K, v=V, **o: brl.skyformer_attention(q, k, v, rng=jax.random.key(0), **o),
    "nystromformer": lambda q=Q, k=K, v=V, **o: brl.nystromformer_attention(q, k, v, **o),
    "global_window": lambda q=Q, k=K, v=V, **o: brl.global_window_attention(
        q, k, v, ranks=(4, 4), window=3, **o
    ),
}

# Keyword arguments that every function of query, key and value refuses, and the errors.
COMMON = {
    "query is a list": ({"q": [[1.0]]}, "query must be"),
    "key is None": ({"k": None}, "key must be"),
    "query has three axes": ({"q": Q[0]}, "query must have shape"),
    "query is empty": ({"q": Q[:, :0]}, "query must not be empty|query.*empty"),
    "query holds integers": ({"q": INTS}, "query must be float"),
    "key is of another dtype": ({"k": HALF}, "key must have query's dtype|key.*dtype"),
    "key has another head dimension": ({"k": NARROW}, "key must have|key.*head_dim"),
    "heads do not divide": ({"k": GROUPED, "v": GROUPED}, "heads of query must be a multiple"),
    "value is shorter": ({"v": SHORT}, "value must have key's"),
    "another batch": ({"k": K[:1], "v": V[:1]}, "key must have query's batch"),
    "an unknown implementation": ({"implementation": "fast"}, "implementation must be"),
    "lengths of another shape": ({"key_value_seq_lengths": jnp.asarray([3])}, "key_value_seq_lengths must"),
    "lengths that are floats": (
        {"key_value_seq_lengths": jnp.asarray([3.0, 4.0])},
        "key_value_seq_lengths must",
    ),
}
ROWS = [(name, case) for name in SOFTMAX for case in COMMON]


@pytest.mark.parametrize(("name", "case"), ROWS, ids=lambda x: x.replace(" ", "-"))
def test_query_key_value(name, case):
    options, message = COMMON[case]
    with pytest.raises((ValueError, TypeError), match=message):
        SOFTMAX[name](**options)


@pytest.mark.parametrize("name", SOFTMAX)
def test_float64(name):
    """Sums are in float32, so results would have half of the digits that their type promises."""
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match="query must be float32, bfloat16 or float16, got float64"),
    ):
        SOFTMAX[name](*(x.astype(jnp.float64) for x in (Q, K, V)))


SCALES = (
    "full",
    "local",
    "diag",
    "hopfield",
    "bsbr",
    "linformer",
    "nystromformer",
    "kernelized",
    "skyformer",
    "informer",
)


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("scale", [math.nan, math.inf, "1", True, [0.1]])
def test_scale(name, scale):
    with pytest.raises((ValueError, TypeError), match="scale must be"):
        SOFTMAX[name](scale=scale)


def decoder(**options):
    options = {"vocab_size": 16, "num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 16} | options
    return brl.DecoderLM(brl.DecoderConfig(mechanism=options.pop("mechanism", brl.FullConfig()), **options))


def classifier(**options):
    options = {"vocab_size": 16, "num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 16} | options
    return brl.Classifier(
        brl.EncoderConfig(mechanism=options.pop("mechanism", brl.FullConfig()), max_length=8, **options)
    )


IDS = jnp.zeros((1, 4), jnp.int32)


def zeros(model):
    """Parameters that need no compilation."""
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), IDS))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def run(model, *arguments, **options):
    return model.apply(zeros(model), *arguments, **options)


def generate(prompts=IDS, variables=None, model=None, **options):
    model = decoder() if model is None else model
    variables = zeros(model) if variables is None else variables
    return brl.generate(model, variables, prompts, **{"max_new_tokens": 2, "temperature": 0.0} | options)


SIZES = brl.BlockSizes(2, 2, 2, 4)


def native_sparse(**options):
    blocks = (brl.compression_blocks(x, SIZES).mean(2) for x in (K, V))
    return brl.native_sparse_attention(Q, K, V, *blocks, Q[..., :3], sizes=SIZES, window=3, **options)


def compress(q=TOKENS, k=K, c=V, v=V, **options):
    return brl.compress(q, k, c, v, **{"gamma": 0.1} | options)


def propagate(q=Q, k=TOKENS, v=TOKENS, **options):
    return brl.propagate(q, k, v, **{"strength": 0.5} | options)


CALLS = {
    # Local attention and its patterns.
    "no window": (lambda: brl.local_attention(Q, K, V), "local_window_size and pattern"),
    "window and pattern": (
        lambda: brl.local_attention(Q, K, V, **WINDOW, pattern=brl.SlidingWindow(1, 1)),
        "local_window_size and pattern",
    ),
    "window of three": (
        lambda: brl.local_attention(Q, K, V, local_window_size=(1, 2, 3)),
        "local_window_size must be",
    ),
    "window below 0": (
        lambda: brl.local_attention(Q, K, V, local_window_size=-1),
        "local_window_size must be",
    ),
    "window of floats": (
        lambda: brl.local_attention(Q, K, V, local_window_size=1.5),
        "local_window_size must",
    ),
    "a pattern that is none": (lambda: brl.local_attention(Q, K, V, pattern="sliding"), "pattern must be"),
    "global tokens, causal": (
        lambda: brl.local_attention(Q, K, V, pattern=brl.GlobalWindow(1, 1, 1), is_causal=True),
        "is_causal must be False",
    ),
    "a bias of another shape": (
        lambda: brl.local_attention(Q, K, V, **WINDOW, bias=array(3, 5)),
        "bias must broadcast",
    ),
    "a bias of integers": (
        lambda: brl.local_attention(Q, K, V, **WINDOW, bias=jnp.ones((T, T), jnp.int32)),
        "bias must be floating",
    ),
    "a bias that is a function": (
        lambda: brl.local_attention(Q, K, V, **WINDOW, bias=lambda i, j: jnp.zeros((N, len(i), len(j)))),
        "bias must be a pytree .* got function",
    ),
    "full: a bias that is a function": (
        lambda: brl.full_attention(Q, K, V, bias=lambda i, j: jnp.zeros((N, len(i), len(j)))),
        "bias must be a pytree .* got function",
    ),
    "a bias that is a string": (lambda: brl.local_attention(Q, K, V, **WINDOW, bias="alibi"), "bias must be"),
    "segment ids of another length": (
        lambda: brl.local_attention(Q, K, V, **WINDOW, segment_ids=jnp.zeros((B, 3), jnp.int32)),
        "segment_ids of the queries must be",
    ),
    "segment ids that are floats": (
        lambda: brl.local_attention(Q, K, V, **WINDOW, segment_ids=jnp.zeros((B, T))),
        "segment_ids of the queries must be",
    ),
    "one array of segment ids for two lengths": (
        lambda: brl.local_attention(Q, SHORT, SHORT, **WINDOW, segment_ids=jnp.zeros((B, T), jnp.int32)),
        "segment_ids must be a pair",
    ),
    "value of another head dimension": (
        lambda: brl.local_attention(Q, K, NARROW, **WINDOW),
        "value must have",
    ),
    "diag: value of another head dimension": (lambda: brl.diag_attention(Q, K, NARROW), "value must have"),
    "a key offset of floats": (
        lambda: brl.local_attention(Q, K, V, **WINDOW, key_offset=1.5),
        "key_offset must be",
    ),
    "a query offset of floats": (
        lambda: brl.local_attention(Q, K, V, **WINDOW, query_offset=1.5),
        "query_offset must be",
    ),
    "cuDNN in float32": (
        lambda: brl.local_attention(
            Q, K, V, local_window_size=(3, 0), is_causal=True, implementation="cudnn"
        ),
        "implementation='cudnn'",
    ),
    "SlidingWindow(-1, 0)": (lambda: brl.SlidingWindow(-1, 0), "left"),
    "SlidingWindow.of_width(0)": (lambda: brl.SlidingWindow.of_width(0, True), "width must be"),
    "Dilated with a dilation of 0": (lambda: brl.Dilated(1, 1, 0), "dilation"),
    "BlockDiagonal(0)": (lambda: brl.BlockDiagonal(0), "block"),
    "Fixed with more summaries than positions": (lambda: brl.Fixed(2, 3), "summary must"),
    "BigBird with an even window": (lambda: brl.BigBird(4, window_blocks=2), "window_blocks"),
    "BlockMask of floats": (lambda: brl.BlockMask.of(4, np.ones((2, 2))), "mask must be"),
    "BlockMask of ragged rows": (lambda: brl.BlockMask(4, ((True,), (True, False))), "mask"),
    "BlockMask that is too small": (
        lambda: brl.local_attention(Q, K, V, pattern=brl.BlockMask.of(4, np.ones((2, 2), bool))),
        "mask of BlockMask covers",
    ),
    "alibi_slopes(0)": (lambda: brl.alibi_slopes(0), "num_heads must be"),
    "ALiBi of an int": (lambda: brl.local_attention(Q, K, V, **WINDOW, bias=brl.ALiBi(4)), "slopes"),
    "ALiBi of another number of heads": (
        lambda: brl.local_attention(Q, K, V, **WINDOW, bias=brl.ALiBi(brl.alibi_slopes(3))),
        "bias",
    ),
    "T5Bias of too few buckets": (
        lambda: brl.local_attention(Q, K, V, **WINDOW, bias=brl.T5Bias(array(2, N))),
        "num_buckets",
    ),
    # Compression and propagation.
    "compress: a bias of three axes": (lambda: compress(bias=array(N, 5, T)), "bias must"),
    "compress: no contrast key": (lambda: compress(c=None), "gamma and contrast_key"),
    "compress: no gamma": (lambda: compress(gamma=None), "gamma and contrast_key"),
    "compress: gamma of another shape": (lambda: compress(gamma=jnp.ones((3,))), "gamma must have shape"),
    "compress: other heads": (lambda: compress(k=GROUPED, c=GROUPED, v=GROUPED), "heads of query must be"),
    "compress: contrast key of another shape": (lambda: compress(c=SHORT), "contrast_key must have"),
    "compress: lengths of another shape": (
        lambda: compress(key_value_seq_lengths=jnp.asarray([3])),
        "key_value_seq_lengths must",
    ),
    "compress: a bias for other keys": (
        lambda: compress(bias=array(1, 1, 5, T + 1)),
        "bias must broadcast to",
    ),
    "compress: lengths in a list": (
        lambda: compress(key_value_seq_lengths=[3]),
        "key_value_seq_lengths must",
    ),
    "compress: lengths beyond the keys": (
        lambda: compress(key_value_seq_lengths=jnp.asarray([3, 99])),
        "key_value_seq_lengths must",
    ),
    "compress: a mask of floats": (lambda: compress(mask=jnp.ones((1, 1, 5, T))), "mask must"),
    "compress: a mask of another shape": (lambda: compress(mask=jnp.ones((3, 1, 5, T), bool)), "mask must"),
    "compress: integers": (lambda: compress(q=jnp.ones((B, 5, N, H), jnp.int32)), "query must be"),
    "compress: scale is NaN": (lambda: compress(scale=math.nan), "scale must be"),
    "compress: scale is text": (lambda: compress(scale="1"), "scale must be a Python number"),
    "compress: scale is traced": (
        lambda: jax.jit(lambda scale: compress(scale=scale))(0.5),
        "scale must be a Python number",
    ),
    "propagate: scale is traced": (
        lambda: jax.jit(lambda scale: propagate(scale=scale))(0.5),
        "scale must be a Python number",
    ),
    "compress: keys of another dtype": (lambda: compress(k=HALF), "key must have query's dtype"),
    "propagate: a bias for other tokens": (
        lambda: propagate(bias=array(1, 1, T, 6)),
        "bias must broadcast to",
    ),
    "luna: segment ids of another length": (
        lambda: brl.luna_attention(Q, K, V, array(3, N, H), segment_ids=jnp.zeros((B, T + 1), jnp.int32)),
        "segment_ids of the queries must be",
    ),
    "propagate: strength of another shape": (
        lambda: propagate(strength=jnp.ones((3,))),
        "strength must have",
    ),
    "propagate: a list": (lambda: propagate(q=[[1.0]]), "query must be"),
    "propagate: mixed dtypes": (lambda: propagate(q=HALF), "key must have query's dtype"),
    "propagate: scale is infinite": (lambda: propagate(scale=math.inf), "scale must be"),
    "propagate: an unknown implementation": (lambda: propagate(implementation="gpu"), "implementation must"),
    "propagate: integers": (lambda: propagate(q=INTS), "query must be"),
    # Recurrent and structured functions.
    "linear: positions of a list": (
        lambda: SOFTMAX["linear"](positions=[[0] * T]),
        "positions must .* got list",
    ),
    "linear: a decay that is a number": (
        lambda: SOFTMAX["linear"](is_causal=True, normalize=False, log_decay=-0.1),
        "log_decay must be .* got float",
    ),
    "gated_delta: decays and strengths by position": (
        lambda: brl.gated_delta_rule(Q, K, V, -BETA, BETA),
        "takes 3 positional arguments but 5 were given",
    ),
    "delta: a strength that is a number": (
        lambda: brl.delta_rule(Q, K, V, beta=0.5),
        "beta must be .* got float",
    ),
    "long_short: positions of another length": (
        lambda: brl.long_short_attention(Q, K, V, Q[..., :2], positions=jnp.zeros((1, T + 1), jnp.int32)),
        r"positions must have shape \(1, 12\) or \(2, 12\), .* got \(1, 13\)",
    ),
    "native_sparse: sizes that are a tuple": (
        lambda: brl.compression_blocks(K, (2, 2, 2, 4)),
        "sizes must be",
    ),
    "native_sparse: segment ids of another length": (
        lambda: native_sparse(segment_ids=jnp.zeros((B, T + 1), jnp.int32)),
        "segment_ids of the queries must be",
    ),
    "native_sparse: segment ids of blocks": (
        lambda: brl.compression_blocks(K, SIZES, jnp.zeros((B, T))),
        "segment_ids of the queries must be ints",
    ),
    "linear: a state without causality": (lambda: SOFTMAX["linear"](return_state=True), "return_state needs"),
    "linear: a decay of another shape": (
        lambda: SOFTMAX["linear"](is_causal=True, normalize=False, log_decay=BETA[:, :3]),
        r"log_decay must be floating point of shape \(",
    ),
    "linear: a decay and a denominator": (
        lambda: SOFTMAX["linear"](is_causal=True, log_decay=BETA),
        "log_decay needs is_causal=True and normalize=False",
    ),
    "delta: beta of another shape": (lambda: brl.delta_rule(Q, K, V, beta=BETA[:, :3]), "beta must be"),
    "gated delta: a decay of another shape": (
        lambda: brl.gated_delta_rule(Q, K, V, beta=BETA, log_decay=BETA[:, :3]),
        "log_decay must be",
    ),
    "kimi delta: a decay of another shape": (
        lambda: brl.kimi_delta_rule(Q, K, V, beta=BETA, log_decay=BETA),
        "log_decay must be floating point of shape .*key features",
    ),
    "gated delta 2: a write gate of another shape": (
        lambda: brl.gated_delta_rule_2(Q, K, V, erase=K, write=BETA, log_decay=-K),
        "write must be floating point of shape .*value features",
    ),
    "rwkv7: a rate of each head": (
        lambda: brl.rwkv7_attention(Q, K, V, removal_key=K, learning_rate=BETA, log_decay=-K),
        "learning_rate must be floating point of shape .*key features",
    ),
    "performer: neither key nor projection": (lambda: brl.performer_attention(Q, K, V), "rng|projection"),
    "cosformer: a maximum of 0": (
        lambda: brl.cosformer_attention(Q, K, V, max_length=0),
        "max_length must be",
    ),
    "bsbr: a state of no rows": (lambda: brl.init_bsbr_state(0, 2, 4, length=8), "batch must be"),
    "hopfield: no steps": (lambda: SOFTMAX["hopfield"](steps=0), "steps must be"),
    "linformer: causal": (lambda: SOFTMAX["linformer"](is_causal=True), "is_causal"),
    "linformer: too short a projection": (
        lambda: brl.linformer_attention(Q, K, V, key_projection=array(4, 3), value_projection=array(4, 3)),
        "key_projection must",
    ),
    "diag: a block of 0": (lambda: SOFTMAX["diag"](block_size=0), "block_size must be"),
    "mlr: ranks that do not add up": (lambda: brl.mlr_attention(Q, K, V, ranks=(4, 2)), "ranks must"),
    "mlr: no ranks": (lambda: brl.mlr_attention(Q, K, V, ranks=()), "ranks must"),
    "mlr: block sizes of another number": (
        lambda: brl.mlr_attention(Q, K, V, ranks=(4, 4), block_sizes=(None,)),
        "block_sizes must",
    ),
    "global_window: ranks that do not add up": (
        lambda: brl.global_window_attention(Q, K, V, ranks=(4, 2), window=3),
        "ranks must",
    ),
    "global_window: a window below 0": (
        lambda: brl.global_window_attention(Q, K, V, ranks=(4, 4), window=-1),
        "window must be",
    ),
    "btt_factors(0)": (lambda: brl.btt_factors(0), "width must be"),
    "doubling_block_sizes of no levels": (lambda: brl.doubling_block_sizes(8, 0), "levels must be"),
    # Configurations.
    "BRL: a block of 0": (lambda: brl.BRLConfig(block_size=0), "block_size must be"),
    "BRL: rotary positions of an odd head": (
        lambda: decoder(mechanism=brl.BRLConfig(compressed_dim=10, compress_positions="rope")),
        "compress_positions='rope' needs an even compressed_dim / num_heads, got 5",
    ),
    "BRL: beta above 1": (lambda: brl.BRLConfig(beta=2.0), "beta must be"),
    "local: a window of 0": (lambda: brl.LocalConfig(window=0), "window must be"),
    "decoder: a mechanism's name": (lambda: decoder(mechanism="local"), "mechanism must be"),
    "decoder: rope_theta below 0": (lambda: decoder(rope_theta=-1.0), "rope_theta must be"),
    "decoder: rope_theta 0": (lambda: decoder(rope_theta=0.0), "rope_theta must be"),
    "decoder: heads that do not divide": (lambda: decoder(num_heads=3), "d_model must be a multiple"),
    "decoder: an unknown implementation": (lambda: decoder(implementation="gpu"), "implementation must be"),
    "decoder: dropout of 1": (lambda: decoder(dropout=1.0), "dropout must be"),
    "decoder: a bidirectional mechanism": (
        lambda: decoder(mechanism=brl.LinformerConfig()),
        "no causal form",
    ),
    "classifier: one class": (lambda: classifier(num_classes=1), "num_classes must be"),
    # Networks.
    "decoder: tokens that are floats": (lambda: run(decoder(), jnp.zeros((1, 4))), "tokens must be integers"),
    "decoder: tokens of one axis": (
        lambda: run(decoder(), jnp.zeros((4,), jnp.int32)),
        "tokens must have shape",
    ),
    "decoder: memory and cache": (
        lambda: run(decoder(), IDS, memory=1, cache=2),
        "memory and cache exclude each other",
    ),
    "decoder: a cache of no rows": (lambda: decoder().init_cache(0, 4), "batch and length of a cache"),
    "classifier: too long": (
        lambda: run(classifier(), jnp.zeros((1, 9), jnp.int32)),
        "tokens must be at most",
    ),
    # Generation.
    "generate: an empty prompt": (lambda: generate(jnp.zeros((1, 0), jnp.int32)), "prompts must be"),
    "generate: a token outside the vocabulary": (lambda: generate(jnp.full((1, 2), 16)), "prompts must hold"),
    "generate: floats": (lambda: generate(jnp.zeros((1, 2))), "prompts must be"),
    "generate: ragged lists": (lambda: generate([[1, 2], [3]]), "prompts must have rows of equal length"),
    "generate: no new tokens": (lambda: generate(max_new_tokens=0), "max_new_tokens must be"),
    "generate: no random key": (lambda: generate(temperature=1.0), "rng is needed"),
    "generate: temperature below 0": (lambda: generate(temperature=-1.0), "temperature must"),
    "generate: top_p of 0": (lambda: generate(top_p=0.0), "top_p must"),
    "generate: top_k of 0": (lambda: generate(top_k=0), "top_k must"),
    "generate: lengths beyond the prompt": (lambda: generate(lengths=np.asarray([9])), "lengths must"),
    "generate: empty variables": (lambda: generate(variables={}), "variables must"),
    "generate: an encoder": (
        lambda: generate(model=classifier()),
        "model must be a decoder|model must",
    ),
}


# Values that do not fit an annotation of each type.
UNFIT = {
    bool: ["no", 1, jnp.zeros((2,), bool)],
    int: ["4", 2.5, True, 2**70, -(2**70)],
    float: ["0.1", math.nan, math.inf, True],
    str: [3],
}
FUNCTIONS = {name: x for name in brl.__all__ if inspect.isfunction(x := getattr(brl, name))}
CONFIGURATIONS = {x.__name__: x for x in (*brl.MECHANISMS.values(), brl.Dimensions)} | {
    name: getattr(brl, name) for name in brl.__all__ if name.endswith("Config")
}
KEYS = [0, "k", jnp.zeros(3), jax.random.split(jax.random.key(0), 3)]


def kinds(hint):
    """The types in an annotation, each with its `Literal`s and without its ranges."""
    if typing.get_origin(hint) is typing.Annotated:
        return kinds(hint.__origin__)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return [kind for part in typing.get_args(hint) for kind in kinds(part)]
    return [hint]


def unfit(hint):
    """Values that an annotation does not allow; none for classes, and for arrays alone."""
    found = kinds(hint)
    if hint in (PRNGKeyArray, PRNGKeyArray | None):
        return KEYS + [None] * (type(None) not in found)
    plain = [kind for kind in found if kind in UNFIT or typing.get_origin(kind) is typing.Literal]
    if len(plain) + (type(None) in found) < len(found):  # an array or a tuple is allowed as well
        values = [] if not plain or str in plain else ["?", True]
        values += [math.nan] * (float in plain)
    else:
        values = UNFIT.get(plain[0], ["?"]) if plain else []
    return values + [None] * (bool(values) and type(None) not in found)


def check_refused(make, hints, given=()):
    """Each value that an annotation does not allow is refused by one line that names the argument."""
    count = 0
    for name, hint in hints.items():
        for value in unfit(hint) if name not in ("return", "implementation", "scale") else ():
            with pytest.raises(ValueError, match=rf"^{name} must be .*, got .*$") as error:
                make(**dict(given, **{name: value}))
            assert "\n" not in str(error.value)
            count += 1
    return count


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_annotations_of_a_function_say(name):
    check_refused(FUNCTIONS[name], typing.get_type_hints(FUNCTIONS[name], include_extras=True))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_what_annotations_of_a_configuration_say(name):
    kind = CONFIGURATIONS[name]
    sizes = {"d_model": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "d_ff": 16, "is_causal": True}
    hints = typing.get_type_hints(kind, include_extras=True)
    given = {x.name: sizes[x.name] for x in dataclasses.fields(kind) if x.name in sizes}
    check_refused(kind, {x.name: hints[x.name] for x in dataclasses.fields(kind)}, given)


def test_flags_numbers_and_keys_are_found():
    hints = typing.get_type_hints(brl.sinkhorn_attention, include_extras=True)
    assert {name: len(unfit(hints[name])) for name in ("is_causal", "temperature", "block_size", "rng")} == {
        "is_causal": 4,
        "temperature": 5,
        "block_size": 6,
        "rng": 4,
    }


ROTATIONS = brl.reformer_rotations(jax.random.key(0), H, num_buckets=4)


FEW = (Q[:, :3], K[:, :3], V[:, :3])
PROJECTED = {"length": 16, "rank": 2, "window": 4, "chunk_size": 2}

#: Calls with a state, in which 3 of 3 tokens may be valid.
COUNTED = {
    "diag": lambda **o: brl.diag_attention(
        *FEW, block_size=4, state=brl.init_diag_state(B, N, H, block_size=4), return_state=True, **o
    ),
    "mlr": lambda **o: brl.mlr_attention(
        *FEW, **MLR, state=brl.init_mlr_state(B, N, H, length=16, **MLR), **o
    ),
    "long_short": lambda **o: brl.long_short_attention(
        *FEW, Q[:, :3, :, :2], state=brl.init_long_short_state(B, N, H, **PROJECTED), **o
    ),
    "reformer": lambda **o: brl.reformer_attention(
        Q[:, :3], V[:, :3], ROTATIONS, state=brl.init_reformer_state(B, N, H, length=16, num_buckets=4), **o
    ),
    "sinkhorn": lambda **o: brl.sinkhorn_attention(
        *FEW,
        array(B, 4, N, 4),
        block_size=4,
        state=brl.init_sinkhorn_state(B, N, H, length=16, block_size=4),
        **o,
    ),
    "informer": lambda **o: brl.informer_attention(
        *FEW, rng=jax.random.key(0), state=brl.init_informer_state(B, N, H, length=16), **o
    ),
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("count", [-1, 9])
def test_count(name, count):
    with pytest.raises(ValueError, match=f"count must be from 0 to 3, got {count}"):
        COUNTED[name](count=count, is_causal=True)


def long_short(**options):
    return brl.long_short_attention(Q, K, V, Q[..., :2], **options)


def compress_blocks(lengths):
    few = jnp.stack([TOKENS] * 4, 1)
    return brl.compress_blocks(
        few, K, K, V, gamma=0.1, block_size=3, history_size=3, history_lengths=jnp.asarray(lengths)
    )


SIDES = array(2, N, H)


def rotary(right=SIDES[1], **options):
    return brl.local_attention(Q, K, V, **WINDOW, bias=brl.RotaryBias(SIDES[0], right, **options))


WEIGHTS = [array(1, 8, N, 2), array(2, 4, N, 2)]

#: What annotations say, and values that are known.
DECLARED = {
    "norm: epsilon below 0": (lambda: SOFTMAX["norm"](epsilon=-1), "epsilon must be at least 0, got -1"),
    "long_short: epsilon below 0": (lambda: long_short(epsilon=-1.0), "epsilon must be"),
    "long_short: norms in a tuple": (lambda: long_short(norms=(1, 2)), "norms must be of type Norms, got"),
    "linear: rope_theta 0": (
        lambda: SOFTMAX["linear"](positions=jnp.arange(T)[None], rope_theta=0.0),
        "rope_theta must be above 0, got 0.0",
    ),
    "RotaryBias: theta below 0": (lambda: rotary(theta=-1.0), "theta must be"),
    "RotaryBias: sides of other heads": (
        lambda: rotary(right=array(N + 1, H)),
        "left and right of RotaryBias must have one shape",
    ),
    "ALiBi of a list": (lambda: brl.local_attention(Q, K, V, **WINDOW, bias=brl.ALiBi([0.5] * N)), "slopes"),
    "compress_blocks: a history beyond its size": (
        lambda: compress_blocks([0, 99, 0, 0]),
        r"history_lengths must be from 0 to 3, got \[\[ 0 99",
    ),
    "compress_blocks: a history below 0": (lambda: compress_blocks([0, -9, 0, 0]), "history_lengths must be"),
    "compress: an axis that no mesh has": (
        lambda: compress(axis_name="nope"),
        "axis_name must be .* got 'nope'",
    ),
    "performer: rng is a number": (
        lambda: brl.performer_attention(Q, K, V, rng=0),
        r"rng must be a random key, such as jax.random.key\(0\), or None, got 0",
    ),
    "generate: a stop token that is a number": (
        lambda: generate(stop_tokens=3),
        "stop_tokens must be a list, got 3",
    ),
    "generate: a class": (
        lambda: generate(model=brl.DecoderLM, variables=zeros(decoder())),
        "model must be .* got the class DecoderLM",
    ),
    "generate_requests: none": (
        lambda: brl.generate_requests(decoder(), zeros(decoder()), None),
        "requests must be",
    ),
    "bilinear_mlr: no weights": (
        lambda: brl.bilinear_mlr_attention(array(B, T, 8), V, query_weights=None, key_weights=WEIGHTS),
        "query_weights must be a list, got None",
    ),
    "transnormer: kind is text": (
        lambda: brl.transnormer("t1", "x"),
        "kind must be a class of config.* got 'x'",
    ),
    "a window of 2**40": (
        lambda: brl.local_attention(Q, K, V, local_window_size=2**40),
        "local_window_size must be at most",
    ),
    "a pair of windows of 10**12": (
        lambda: brl.local_attention(Q, K, V, local_window_size=(10**12, 0)),
        "local_window_size must be",
    ),
    # Networks.
    "stack: no mechanisms": (
        lambda: brl.Stack(None, decoder().config.make_dimensions(is_causal=True)).init(
            jax.random.key(0), Q[0]
        ),
        "mechanisms and dimensions must be a network's, .* got None and Dimensions",
    ),
    "stack: a mechanism's name": (
        lambda: brl.Stack(("full",), decoder().config.make_dimensions(is_causal=True)).init(
            jax.random.key(0), Q[0]
        ),
        "mechanisms and dimensions must be .* got .'full',. and Dimensions",
    ),
    "stack: a configuration for dimensions": (
        lambda: brl.Stack((brl.FullConfig(),), decoder().config).init(jax.random.key(0), Q[0]),
        "mechanisms and dimensions must be .* and DecoderConfig",
    ),
    "decoder: a memory that is a number": (lambda: run(decoder(), IDS, memory=3), "memory must be"),
    "decoder: a cache that is an object": (lambda: run(decoder(), IDS, cache={"a": 1}), "cache must be"),
}


NETWORKS = {
    brl.Classifier: "Encoder",
    brl.DecoderLM: "Decoder",
    brl.Encoder: "Encoder",
    brl.EncoderDecoder: "EncoderDecoder",
    brl.MaskedLM: "Encoder",
    brl.NodeClassifier: "Graph",
    brl.PairClassifier: "Encoder",
    brl.Regressor: "Regressor",
    brl.TokenClassifier: "Encoder",
}


@pytest.mark.parametrize("name", ["linear", "norm", "flowformer", "luna"])
def test_positions_are_integers(name):
    with pytest.raises(ValueError, match="positions must be integers, got float32"):
        SOFTMAX[name](positions=jnp.zeros((1, T)))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("config", [None, brl.StackConfig()], ids=["None", "StackConfig"])
def test_networks_say_which_configuration_they_need(network, config):
    given = "None" if config is None else "StackConfig"
    needed = [
        x
        for x in inspect.signature(network.__call__).parameters.values()
        if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD and x.name != "self"
    ]
    with pytest.raises(ValueError, match=f"config must be an? {NETWORKS[network]}Config, got {given}"):
        network(config).init(jax.random.key(0), *[IDS] * len(needed))


@pytest.mark.parametrize("case", DECLARED, ids=lambda x: x.replace(" ", "-"))
def test_what_is_declared(case):
    call, message = DECLARED[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("case", CALLS, ids=lambda x: x.replace(" ", "-"))
def test_call(case):
    call, message = CALLS[case]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        call()
