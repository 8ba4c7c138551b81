"""Bad calls of the public functions, configurations and networks.

Each row is a call that a user could make by mistake and a pattern that the error must match, including the argument's
name. A NaN, a result or an error from inside JAX fails the row."""

import dataclasses
import functools
import inspect
import math
import types
import typing

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Bool, Float, PRNGKeyArray

import brl_jax as brl
from brl_jax import models
from brl_jax.attention.low_rank.long_short import Norms
from brl_jax.attention.structured.feature_attention import feature_attention
from brl_jax.fields import Checked, Range
from brl_jax.sharding import MeshConfig
from tests.support.calls import make_calls

B, T, N, H = 2, 12, 4, 8
RNG = np.random.default_rng(0)


def array(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype)  # NumPy's, because JAX compiles what it does outside jit


Q, K, V = (array(B, T, N, H) for _ in range(3))
GROUPED = array(B, T, 3, H)
SHORT = array(B, T - 1, N, H)
HALVES = np.full((2, 3), 0.5, np.float32)
NARROW = array(B, T, N, H - 2)
HALF = Q.astype(jnp.bfloat16)
INTS = np.ones((B, T, N, H), np.int32)
WINDOW = {"local_window_size": 3}
TOKENS = array(B, 5, N, H)
BETA = np.full((B, T, N), 0.5, np.float32)
MLR = {"ranks": (4, 4), "block_sizes": (None, 4)}
KEY = jax.random.key(0)
SIZES = brl.BlockSizes(2, 2, 2, 4)

FUNCTIONS_OF_ARRAYS = make_calls(T, N, H)
#: Functions that take no queries or no keys.
OTHERS = ("synthesizer", "sliceformer", "reformer")
NAMES = [
    name
    for name in FUNCTIONS_OF_ARRAYS
    if name not in (*OTHERS, "compress_blocks", "native_sparse", "synthesizer_dense")
    and not name.startswith(("bilinear", "local_"))
]


def ours(name, q=Q, k=K, v=V, **options):
    make, call = FUNCTIONS_OF_ARRAYS[name]
    arrays = make(B)
    first = (v,) if len(arrays) == 1 else (q, k, v)
    options = ({"write": K} if name == "gated_delta_2" else {}) | options
    return call(*first, *arrays[3:], **options)


local = functools.partial(ours, "local_both_sides")

# Keyword arguments that every function of query, key and value refuses, and the errors.
COMMON = {
    "query is a list": ({"q": [[1.0]]}, "query must be"),
    "key is None": ({"k": None}, "key must be"),
    "query has three axes": ({"q": Q[0]}, "query must have shape"),
    "key has three axes": ({"k": K[:, :, 0]}, "key must have shape"),
    "key is empty": ({"k": K[:, :0], "v": V[:, :0]}, "key must not be empty|key must have query's length"),
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
ROWS = [(name, case) for name in NAMES for case in COMMON if (name, case[:7]) != ("propagate", "lengths")]
ROWS += [(name, case) for name in OTHERS for case in [*COMMON][-3:]]


@pytest.mark.parametrize(("name", "case"), ROWS, ids=lambda x: x.replace(" ", "-"))
def test_query_key_value(name, case):
    options, message = COMMON[case]
    with pytest.raises((ValueError, TypeError), match=message):
        ours(name, **options)


SAME = "bsbr delta diag flowformer informer luna mlr nystromformer sinkhorn skyformer"


@pytest.mark.parametrize("name", SAME.split())
def test_queries_and_keys_are_the_same_tokens(name):
    with pytest.raises(ValueError, match=r"key must have query's length 12\b.* got 11"):
        ours(name, k=SHORT, v=SHORT)


@pytest.mark.parametrize("name", sorted({*NAMES, *OTHERS} - {"compress", "propagate"}))
def test_float64(name):
    """Sums are in float32, so results would have half of the digits that their type promises."""
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match=r"(query|value) must be float32, bfloat16 or float16, got float64"),
    ):
        ours(name, *(x.astype(jnp.float64) for x in (Q, K, V)))


SCALES = (
    "full local diag hopfield bsbr linformer nystromformer kernelized skyformer informer sinkhorn reformer compress "
    "propagate"
)


@pytest.mark.parametrize("name", SCALES.split())
@pytest.mark.parametrize("scale", [math.nan, math.inf, "1", True, [0.1]])
def test_scale(name, scale):
    with pytest.raises((ValueError, TypeError), match="scale must be"):
        ours(name, scale=scale)


def decoder(**options):
    options = {"vocab_size": 16, "num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 16} | options
    return brl.DecoderLM(brl.DecoderConfig(mechanism=options.pop("mechanism", brl.FullConfig()), **options))


def sized(kind, **options):
    return kind(**options).check(brl.Dimensions(64, 4, 2, 16, 64, is_causal=True))


def classifier(**options):
    options = {"vocab_size": 16, "num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 16} | options
    return brl.Classifier(
        brl.EncoderConfig(mechanism=options.pop("mechanism", brl.FullConfig()), max_length=8, **options)
    )


IDS = np.zeros((1, 4), np.int32)
TWO_ROWS = np.zeros((2, 4), np.int32)
ENCODER = brl.Encoder(classifier().config)


def zeros(model):
    """Parameters that need no compilation."""
    shapes = nn.unbox(jax.eval_shape(model.init, KEY, IDS))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def run(model, *arguments, **options):
    return model.apply(zeros(model), *arguments, **options)


def generate(prompts=IDS, variables=None, model=None, **options):
    model = decoder() if model is None else model
    variables = zeros(model) if variables is None else variables
    return brl.generate(model, variables, prompts, **{"max_new_tokens": 2, "temperature": 0.0} | options)


def native_sparse(**options):
    given = {"compressed_key": K[:, :6], "compressed_value": V[:, :6], "gates": Q[..., :3]}
    given |= {"sizes": SIZES, "window": 3}
    return brl.native_sparse_attention(Q, K, V, **given | options)


def diag(**options):
    return brl.diag_attention(Q, K, V, **{"is_causal": "state" in options} | options)


def mlr(**options):
    return brl.mlr_attention(Q, K, V, **{"ranks": (4, 2, 2), "block_sizes": (None, 16, 8)} | options)


def compress(q=TOKENS, k=K, c=V, v=V, **options):
    return brl.compress(q, k, c, v, **{"gamma": 0.1} | options)


def propagate(q=Q, k=TOKENS, v=TOKENS, **options):
    return brl.propagate(q, k, v, **{"strength": 0.5} | options)


WEIGHTS = [array(1, 8, N, 2), array(2, 4, N, 2)]
WIDE = array(1, 9, N, 2)


def bilinear_mlr(**options):
    given = {"query_weights": WEIGHTS, "key_weights": WEIGHTS} | options
    return brl.bilinear_mlr_attention(array(B, T, 8), V, **given)


def bilinear_btt(**options):
    given = {"right": array(2, 4, N, 2, 1), "left": array(N, 2, 4, 2, 1)} | options
    return brl.bilinear_btt_attention(array(B, T, 8), V, **given)


CALLS = [
    # Local attention and its patterns.
    (lambda: brl.local_attention(Q, K, V), "local_window_size and pattern"),
    (lambda: local(pattern=brl.SlidingWindow(1, 1)), "local_window_size and pattern"),
    (lambda: brl.local_attention(Q, K, V, local_window_size=(1, 2, 3)), "local_window_size must be"),
    (lambda: brl.local_attention(Q, K, V, pattern="sliding"), "pattern must be"),
    (lambda: brl.local_attention(Q, K, V, pattern=brl.GlobalWindow(1, 1, 1), is_causal=True),
     "is_causal must be False"),
    (lambda: local(bias=array(3, 5)), "bias must broadcast"),
    (lambda: local(bias=jnp.ones((T, T), jnp.int32)), "bias must be floating"),
    (lambda: local(bias=lambda i, j: jnp.zeros((N, len(i), len(j)))), "bias must be a pytree .* got function"),
    (lambda: brl.full_attention(Q, K, V, bias=lambda i, j: jnp.zeros((N, len(i), len(j)))),
     "bias must be a pytree .* got function"),
    (lambda: local(bias="alibi"), "bias must be"),
    (lambda: local(segment_ids=jnp.zeros((B, 3), jnp.int32)), "segment_ids of the queries must be"),
    (lambda: local(segment_ids=jnp.zeros((B, T))), "segment_ids of the queries must be"),
    (lambda: local(Q, SHORT, SHORT, segment_ids=jnp.zeros((B, T), jnp.int32)), "segment_ids must be a pair"),
    (lambda: local(key_offset=1.5), "key_offset must be"),
    (lambda: local(query_offset=1.5), "query_offset must be"),
    (lambda: brl.local_attention(Q, K, V, local_window_size=(3, 0), is_causal=True, implementation="cudnn"),
     "implementation='cudnn'"),
    (lambda: brl.SlidingWindow.of_width(0, True), "width must be"),
    (lambda: brl.Fixed(2, 3), "summary must"),
    (lambda: brl.BigBird(4, window_blocks=2), "window_blocks"),
    (lambda: brl.BlockMask.of(4, np.ones((2, 2))), "mask must be"),
    (lambda: brl.BlockMask(4, ((True,), (True, False))), "mask"),
    (lambda: brl.BlockMask(4, [[True]]), "mask must be a tuple of tuples"),
    (lambda: brl.BlockMask.of(4, np.ones(3, bool)), "mask must be a bool array .* got bool of shape"),
    (lambda: brl.BigBird(8).visible(0, 0), "BigBird's random blocks need num_positions"),
    (lambda: brl.local_attention(Q, K, V, pattern=brl.BlockMask.of(4, np.ones((2, 2), bool))),
     "mask of BlockMask covers"),
    (lambda: local(bias=brl.ALiBi(4)), "slopes"),
    (lambda: local(bias=brl.ALiBi(brl.alibi_slopes(3))), "bias"),
    (lambda: local(bias=brl.T5Bias(array(2, N))), "num_buckets"),
    (lambda: local(bias=1.0), "bias must be a PositionBias or an array, got float"),
    (lambda: local(query_offset=jnp.float32(1)), "query_offset must be an integer scalar, got float32"),
    (lambda: brl.local_attention(Q, K, V, pattern=brl.Strided(3), query_offset=jnp.int32(1)),
     r"query_offset must be an int if the pattern reaches everywhere, got a traced one with Strided"),
    (lambda: local(bias=brl.ALiBi(brl.alibi_slopes(4)), mask=np.ones((T, T), bool)), "mask must be None with ALiBi"),
    (lambda: brl.local_attention(Q, K, V, pattern=brl.BigBird(4), is_causal=True),
     "is_causal must be False with BigB"),
    (lambda: diag(return_state=True, is_causal=False), "state and return_state must be given with is_causal=True"),
    (lambda: diag(state={"sum": K}), "state must be of type DiagState, got"),
    (lambda: diag(count=1), "count must be None without state"),
    (lambda: diag(state=brl.init_diag_state(2, 1, 8)),
     r"state\.key must be float32 of shape \(2, 64, 4, 8\), got float32 of shape \(2, 64, 1, 8\)"),
    (lambda: diag(state=brl.init_diag_state(2, 4, 8)._replace(value=jnp.zeros((2, 64, 4, 8), jnp.bfloat16))),
     r"state\.value must be float32"),
    # Full attention.
    (lambda: ours("full", query_offset=1.0), "query_offset must be an integer or an array, got 1.0"),
    (lambda: ours("full", bias=brl.ALiBi(brl.alibi_slopes(2))),
     r"bias must give shape \(4, 12, 12\), gave \(2, 12, 12\)"),
    (lambda: ours("full", bias=array(12, 11)), r"bias must broadcast to .* got shape \(12, 11\)"),
    (lambda: ours("full", segment_ids=jnp.zeros((B, T))), "segment_ids of the queries must be ints .* got float32"),
    (lambda: ours("full", mask=np.ones((T, T))), "mask must be a bool array, got float64"),
    (lambda: ours("full", mask=np.ones((3, T, T), bool)),
     r"mask must broadcast to .*\(2, 4, 12, 12\), got shape \(3, 12, 12\)"),
    (lambda: ours("full", mask="causal"), "mask must be a bool array, got str"),
    (lambda: ours("synthesizer", rows=array(1, T, N, 3)), "rows must have shape"),
    (lambda: ours("synthesizer", columns=array(T - 1, N, 3)),
     "columns must have an entry for each of 12 values, got 11"),
    (lambda: ours("synthesizer", columns=array(T, N, 2)), "columns must have shape"),
    (lambda: ours("synthesizer", columns=array(T, N, 3, dtype=jnp.bfloat16)), "columns must have value's dtype"),
    (lambda: ours("synthesizer", column_bias=array(T - 1, N)), "column_bias must have shape"),
    (lambda: ours("synthesizer", v=GROUPED), "heads of rows must be a multiple"),
    (lambda: ours("synthesizer", query_offset=0.5), "query_offset must be an integer or an array, got 0.5"),
    (lambda: local(sinks=jnp.zeros(3)), r"sinks must be a floating-point array of shape \(4,\), .* got float32 of"),
    (lambda: local(sinks=jnp.zeros(4, jnp.int32)), "sinks must be a floating-point array .* got int32"),
    (lambda: local(sinks=[0.0] * 4), "sinks must be a floating-point array"),
    (lambda: local(logits_soft_cap=jnp.float32(3)), "logits_soft_cap must be a number, got float32"),
    # Compression and propagation.
    (lambda: compress_blocks([1] * 4, SHORT), "= 12 tokens, got 11"),
    (lambda: compress_blocks(gamma=None), "gamma and contrast_key belong together"),
    (lambda: compress_blocks(contrast_key=None), "gamma and contrast_key belong together"),
    (lambda: compress_blocks(contrast_key=SHORT), "contrast_key must have key's shape"),
    (lambda: compress_blocks(keys=GROUPED), "the heads of query must be a multiple"),
    (lambda: compress_blocks(value=HALF), "value must have query's dtype"),
    (lambda: compress_blocks(score="sigmoid"), "score must be"),
    (lambda: compress_blocks([1] * 3), r"history_lengths must be ints of shape \(4,\) or \(2, 4\)"),
    (lambda: compress_blocks([1.0] * 4), "history_lengths must be ints .*, got float32"),
    (lambda: compress_blocks(bias=array(N, 5, 4)), r"bias must have shape .* = \(4, 5, 3\), got \(4, 5, 4\)"),
    (lambda: compress_blocks(bias=array(5, 3), implementation="pallas_interpret"), "bias must have shape"),
    (lambda: compress(bias=array(N, 5, T)), "bias must"),
    (lambda: compress(bias=[[[[0.0]]]]), "bias must be a PositionBias or an array, got list"),
    (lambda: compress_blocks(bias=[[[0.0]]]), r"bias must have shape .* = \(4, 5, 3\), got list"),
    (lambda: compress(c=None), "gamma and contrast_key"),
    (lambda: compress(gamma=None), "gamma and contrast_key"),
    (lambda: compress(gamma=jnp.ones((3,))), "gamma must have shape"),
    (lambda: compress(c=SHORT), "contrast_key must have"),
    (lambda: compress(bias=array(1, 1, 5, T + 1)), "bias must broadcast to"),
    (lambda: compress(key_value_seq_lengths=[3]), "key_value_seq_lengths must"),
    (lambda: compress(key_value_seq_lengths=jnp.asarray([3, 99])), "key_value_seq_lengths must"),
    (lambda: compress(mask=jnp.ones((1, 1, 5, T))), "mask must"),
    (lambda: compress(mask=jnp.ones((3, 1, 5, T), bool)), "mask must"),
    (lambda: jax.jit(lambda scale: compress(scale=scale))(0.5), "scale must be a Python number"),
    (lambda: jax.jit(lambda scale: propagate(scale=scale))(0.5), "scale must be a Python number"),
    (lambda: propagate(bias=array(1, 1, T, 6)), "bias must broadcast to"),
    (lambda: brl.luna_attention(Q, K, V, array(3, N, H), segment_ids=jnp.zeros((B, T + 1), jnp.int32)),
     "segment_ids of the queries must be"),
    (lambda: propagate(strength=jnp.ones((3,))), "strength must have"),
    # Recurrent and structured functions.
    (lambda: ours("linear", positions=[[0] * T]), "positions must .* got list"),
    (lambda: ours("linear", normalize=False, log_decay=-0.1), "log_decay must be .* got float"),
    (lambda: brl.gated_delta_rule(Q, K, V, -BETA, BETA), "takes 3 positional arguments but 5 were given"),
    (lambda: brl.delta_rule(Q, K, V, beta=0.5), "beta must be .* got float"),
    (lambda: long_short(positions=jnp.zeros((1, T + 1), jnp.int32)),
     r"positions must have shape \(1, 12\) or \(2, 12\), .* got \(1, 13\)"),
    (lambda: brl.compression_blocks(K, (2, 2, 2, 4)), "sizes must be"),
    (lambda: native_sparse(segment_ids=jnp.zeros((B, T + 1), jnp.int32)), "segment_ids of the queries must be"),
    (lambda: brl.compression_blocks(K, SIZES, jnp.zeros((B, T))), "segment_ids of the queries must be ints"),
    (lambda: ours("linear", is_causal=False, return_state=True), "return_state needs"),
    (lambda: ours("linear", normalize=False, log_decay=BETA[:, :3]),
     r"log_decay must be floating point of shape \("),
    (lambda: ours("linear", log_decay=BETA), "log_decay needs is_causal=True and normalize=False"),
    (lambda: brl.delta_rule(Q, K, V, beta=BETA[:, :3]), "beta must be"),
    (lambda: brl.gated_delta_rule(Q, K, V, beta=BETA, log_decay=BETA[:, :3]), "log_decay must be"),
    (lambda: brl.kimi_delta_rule(Q, K, V, beta=BETA, log_decay=BETA),
     "log_decay must be floating point of shape .*key features"),
    (lambda: brl.gated_delta_rule_2(Q, K, V, erase=K, write=BETA, log_decay=-K),
     "write must be floating point of shape .*value features"),
    (lambda: brl.rwkv7_attention(Q, K, V, removal_key=K, learning_rate=BETA, log_decay=-K),
     "learning_rate must be floating point of shape .*key features"),
    (lambda: brl.performer_attention(Q, K, V), "rng|projection"),
    *(
        (
            lambda keys=keys, positions=positions: ours(
                "linear", k=K[:, :keys], v=V[:, :keys], positions=positions, is_causal=False
            ),
            r"positions must have shape \(1, 12\) or \(2, 12\)",
        )
        for keys, positions in ((12, jnp.arange(12)), (12, jnp.arange(13)[None]), (11, jnp.arange(12)[None]))
    ),
    # Low-rank functions.
    (lambda: ours("linformer", value_projection=array(3, 3, T)),
     r"value_projection must have shape \(rows, length\) or \(4, rows, length\), got \(3, 3, 12\)"),
    (lambda: ours("linformer", key_projection=array(4, T, dtype=jnp.bfloat16)),
     "key_projection must have key's dtype float32, got bfloat16"),
    (lambda: ours("nystromformer", value_kernel=array(4, 2)),
     r"value_kernel must have shape \(4, an odd size\), got \(4, 2\)"),
    (lambda: ours("kernelized", scale=-1.0), "scale must be at least 0, got -1.0"),
    (lambda: ours("informer", scale=-1.0), "scale must be at least 0, got -1.0"),
    (lambda: ours("skyformer", samples=None), "rng .* or samples must be given, and not both, got neither"),
    (lambda: ours("skyformer", rng=KEY), "rng .* or samples must be given, and not both, got both"),
    (lambda: ours("skyformer", samples=HALVES), r"samples must have shape \(num_samples,\), not empty, got"),
    (lambda: ours("long_short", projection=Q[:, :5, :, :3]),
     r"projection must have shape \(2, 12, 4, 'R'\), got \(2, 5, 4, 3\)"),
    (lambda: ours("long_short", norms=Norms(local=jnp.ones(8))), r"norms.local must have shape \(4, 8\), got \(8,\)"),
    # Functions that sort.
    (lambda: native_sparse(sizes=brl.BlockSizes(5, 2, 4, 4)),
     r"sizes\.compressed must be a multiple of sizes\.stride=2, got 5"),
    (lambda: native_sparse(sizes=brl.BlockSizes(4, 2, 4, 0)), r"sizes\.blocks must be at least 1, got 0"),
    (lambda: native_sparse(gates=Q[..., :2]), r"gates must have shape \(2, 12, 4, 3\), got \(2, 12, 4, 2\)"),
    (lambda: native_sparse(compressed_key=K[:, :5]), r"compressed_key must have shape \(2, 6, 4, 8\)"),
    (lambda: native_sparse(window_value=SHORT), r"window_value must have shape \(2, 12, 4, 8\)"),
    (lambda: ours("reformer", v=SHORT), "value must have query's length 12"),
    (lambda: ours("reformer", v=HALF), "value must have query's dtype float32"),
    (lambda: ours("reformer", v=GROUPED), "the heads of query must be a multiple of the heads of value, got 4 and 3"),
    (lambda: ours("reformer", v=V[:1]), "value must have query's batch size 2, got 1"),
    (lambda: ours("reformer", rotations=array(2, 7, 2)), r"rotations must have shape \(rounds, 8, directions\), got"),
    (lambda: ours("sliceformer", v=[[1.0]]), r"value must be a floating-point array of shape \(B, T, N, V\), got list"),
    (lambda: ours("sliceformer", v=V[0]), "value must have shape"),
    (lambda: ours("sliceformer", v=V[:, :0]), "value must not be empty"),
    (lambda: ours("sliceformer", v=INTS), "value must be float32, bfloat16 or float16, got int32"),
    *(
        (
            lambda given=given: ours("sinkhorn", **given),
            "sort_logits must be a floating-point array of shape .*, got",
        )
        for given in ({"block_size": 2}, {"sort_logits": None})
    ),
    (lambda: ours("linformer", is_causal=True), "is_causal"),
    (lambda: brl.linformer_attention(Q, K, V, key_projection=array(4, 3), value_projection=array(4, 3)),
     "key_projection must"),
    (lambda: brl.mlr_attention(Q, K, V, ranks=(4, 2)), "ranks must"),
    (lambda: brl.mlr_attention(Q, K, V, ranks=()), "ranks must"),
    (lambda: mlr(ranks=(4, 0, 4)), "ranks must be at least 1, got 0"),
    (lambda: mlr(block_sizes=(None, 24, 16)), "nested.*24 before 16"),
    (lambda: mlr(block_sizes=(32, None, 16)), "nested.*32 before None"),
    (lambda: mlr(block_sizes=(32, 16, 0)), "block_sizes must be at least 1, got 0"),
    (lambda: mlr(block_sizes=None, block_ids=np.zeros((B, T, 3), np.int32)),
     r"block_ids must have shape \(2, 12, 2\), .* got \(2, 12, 3\)"),
    (lambda: mlr(block_ids=np.zeros((B, T, 2), np.int32)), "block_ids must have .* neither block_sizes nor sharded"),
    (lambda: mlr(block_sizes=None, block_ids=np.zeros((B, T, 2))), "block_ids must be ints, got float"),
    (lambda: mlr(scale=(1.0, 2.0)), "scale must be a number, or one for each of the 3 ranks"),
    (lambda: brl.mlr_attention(Q, K, V, ranks=(4, 4), block_sizes=(None,)), "block_sizes must"),
    (lambda: brl.global_window_attention(Q, K, V, ranks=(4, 2), window=3), "ranks must"),
    (lambda: bilinear_mlr(query_weights=[], key_weights=[]), "at least one level"),
    (lambda: bilinear_mlr(key_weights=[WEIGHTS[0], array(2, 4, N, 3)]), "key_weights must have query_weights' levels"),
    (lambda: bilinear_mlr(query_weights=[WIDE], key_weights=[WIDE]),
     "weights of level 0 must have shape .* width 8"),
    (lambda: bilinear_mlr(key_norm_scales=[array(2)]), "norm_scales must be one for each of the 2 levels, got 1"),
    (lambda: bilinear_mlr(key_norm_scales=[array(2), array(1)]),
     r"norm_scales of level 1 must have shape \(4,\), got \(1,\)"),
    (lambda: bilinear_btt(norm_scale=array(1)), r"norm_scale must have shape \(8,\), got \(1,\)"),
    (lambda: bilinear_btt(right=array(3, 3, N, 3, 1)), r"right must have shape .* c \* e = 8"),
    (lambda: bilinear_btt(left=array(N, 4, 4, 2, 1)), "left must have shape"),
    (lambda: feature_attention(Q, K, V, implementation="pallas"), "implementation must be None or 'xla'"),
    (lambda: brl.local_attention(Q, K, V, local_window_size=2, implementation="mosaic"), "'cudnn', 'triton'"),
    (lambda: feature_attention(Q, K[:, :, :1], V), "the heads of value must divide the 1 of the keys"),
    (lambda: ours("global_window", ranks=(5,)), r"ranks must be a tuple of 2, got \(5,\)"),
    (lambda: ours("global_window", scale=(1.0, math.nan)), "scale must be finite, got nan"),
    (lambda: ours("linear", feature_map="rlu"), "feature_map must be .*, got 'rlu'; did you mean 'relu'"),
    # States of other sizes, with which a function would count tokens in the wrong buckets or rank too few queries.
    (lambda: stateful("reformer", init("reformer", num_buckets=8)),
     r"state.counts must be int32 of shape \(2, 2, 4, 4\), got int32 of shape \(2, 2, 4, 8\)"),
    (lambda: stateful("reformer", init("reformer", num_rounds=3)),
     r"state.codes must be int32 of shape \(2, 2, 4, 16\), got int32 of shape \(3, 2, 4, 16\)"),
    (lambda: stateful("reformer", init("reformer", num_heads=2)),
     r"state.past.keys must be float32 of shape \(2, 4, 16, 8\), got float32 of shape"),
    (lambda: stateful("informer", init("informer", factor=5)),
     r"state\.measures must be float32 of shape"),
    (lambda: stateful("informer", init("informer", num_heads=8)),
     r"state\.measures must be float32 of shape"),
    (lambda: stateful("mlr", MLR_STATE, ranks=(6, 2)),
     r"state.keys\[0\] must be float32 of shape \(2, 4, 16, 6\), got"),
    (lambda: stateful("mlr", MLR_STATE, block_sizes=(None, 8)),
     r"state.keys\[1\] must be float32 of shape \(2, 4, 8, 4\), got"),
    (lambda: stateful("mlr", MLR_STATE, ranks=(8,), block_sizes=(None,)), "state must have 3 arrays, .*, got 4"),
    (lambda: stateful("mlr", init("mlr", batch=1)),
     r"state.keys\[0\] must be float32 of shape \(2, 4, 16, 4\), got"),
    (lambda: ours("mlr", count=2), "count needs a state"),
    (lambda: stateful("mlr", MLR_STATE, query_seq_lengths=np.ones(2, np.int32)),
     "query_seq_lengths must be None with a state"),
    (lambda: brl.init_mlr_state(2, 2, 8, length=20, ranks=(4, 2), block_sizes=(None, 8)),
     "ranks must sum to the head_dim 8"),
    # Configurations.
    (lambda: brl.BRLConfig(formulation="equation"), "formulation must be .*; did you mean 'equations'"),
    (lambda: decoder(mechanism=brl.BRLConfig(compressed_dim=10, compress_positions="rope")),
     "compress_positions='rope' needs an even compressed_dim / num_heads, got 5"),
    (lambda: decoder(mechanism="local"), "mechanism must be"),
    (lambda: decoder(num_heads=3), "d_model must be a multiple"),
    (lambda: decoder(implementation="gpu"), "implementation must be"),
    (lambda: decoder(mechanism=brl.LinformerConfig()), "no causal form"),
    (lambda: sized(brl.MLRConfig, ranks=(8, 4)), r"ranks must sum to the head_dim 16, got 8\+4 = 12"),
    (lambda: brl.MLRConfig(ranks=(8, 0)), "ranks must be at least 1, got 0"),
    (lambda: brl.MLRConfig(ranks=(8, 4, 4), block_sizes=(None, 24, 16)), "nested.*got 24 before 16"),
    (lambda: brl.MLRConfig(ranks=(8, 8), block_sizes=(None, 24, 12)), "one size for each of the 2 ranks, got 3"),
    (lambda: brl.MLRConfig(block_sizes=(None, 24)), "block_sizes need ranks"),
    (lambda: sized(brl.BilinearMLRConfig, ranks=(8, 4)), r"sum to the head_dim 16, got 8\+4 = 12"),
    (lambda: sized(brl.BilinearMLRConfig, ranks=(2,) * 8),
     "ranks of 8 levels need a d_model that is a multiple of 128, got 64"),
    (lambda: sized(brl.GlobalWindowConfig, ranks=(8, 4)), r"ranks must sum to the head_dim 16, got 8\+4"),
    (lambda: MeshConfig(data=0), "data must be at least 1, or -1"),
    (lambda: MeshConfig(tensor=-2), "tensor must be at least 1, or -1"),
    (lambda: MeshConfig(data=-1, tensor=-1), "tensor must be at least 1 where data is -1"),
    # Networks.
    (lambda: run(decoder(), TWO_ROWS, positions=jnp.arange(4)),
     r"positions must be integers of shape \(1, 4\) or \(2, 4\), got int32 \(4,\)"),
    (lambda: run(decoder(), IDS, positions=jnp.ones((1, 3), jnp.int32)),
     r"positions must be integers of shape .*, got int32 \(1, 3\)"),
    (lambda: run(decoder(), IDS, positions=jnp.ones((1, 4))),
     r"positions must be integers of shape .*, got float32 \(1, 4\)"),
    (lambda: run(decoder(), IDS, segment_ids=jnp.ones(4, jnp.int32)),
     r"segment_ids must be integers of shape \(1, 4\), got int32 \(4,\)"),
    (lambda: run(ENCODER, IDS, segment_ids=IDS[:, :3]),
     r"segment_ids must be integers of shape \(1, 4\), got int32 \(1, 3\)"),
    (lambda: run(ENCODER, IDS, segment_ids=jnp.zeros((1, 4))), "segment_ids must be integers .*, got float32"),
    (lambda: run(ENCODER, IDS, segment_ids=IDS, prefix=jnp.ones((1, 1, 16))),
     "segment_ids must be None with a prefix"),
    (lambda: run(classifier(), IDS.astype(np.float32)), "tokens must be integers, got float32"),
    (lambda: run(classifier(), IDS[0]), r"tokens must have shape \(batch, length\)"),
    (lambda: brl.PairClassifier(classifier().config).init(KEY, IDS),
     r"tokens must have shape \(batch, 2, length\), got \(1, 4\)"),
    (lambda: run(decoder(), jnp.zeros((1, 4))), "tokens must be integers"),
    (lambda: run(decoder(), jnp.zeros((4,), jnp.int32)), "tokens must have shape"),
    (lambda: run(decoder(), IDS, memory=1, cache=2), "memory and cache exclude each other"),
    (lambda: decoder().init_cache(0, 4), "batch and length of a cache"),
    (lambda: run(classifier(), jnp.zeros((1, 9), jnp.int32)), "tokens must be at most"),
    # Generation.
    (lambda: generate(jnp.zeros((1, 0), jnp.int32)), "prompts must be"),
    (lambda: generate(jnp.full((1, 2), 16)), "prompts must hold"),
    (lambda: generate(jnp.zeros((1, 2))), "prompts must be"),
    (lambda: generate([[1, 2], [3]]), "prompts must have rows of equal length"),
    (lambda: jax.jit(generate)(IDS), "prompts and lengths must be known: .* outside jax.jit"),
    (lambda: generate(temperature=1.0), "rng is needed"),
    (lambda: generate(lengths=np.asarray([9])), "lengths must"),
    (lambda: generate(variables={}), "variables must"),
    (lambda: generate(model=classifier()), "model must be a decoder|model must"),
]  # fmt: skip


# Values that do not fit an annotation of each type.
UNFIT = {
    bool: ["no", 1, jnp.zeros((2,), bool)],
    int: ["4", 2.5, True, 2**70, -(2**70)],
    float: ["0.1", math.nan, math.inf, True],
    str: [3],
}
FUNCTIONS = {name: x for name in brl.__all__ if inspect.isfunction(x := getattr(brl, name))}
CLASSES = (*brl.MECHANISMS.values(), *(x for name in brl.__all__ if inspect.isclass(x := getattr(brl, name))))
CONFIGURATIONS = {x.__name__: x for x in CLASSES if issubclass(x, Checked) and dataclasses.is_dataclass(x)}
#: Values of fields that configurations cannot do without.
VALID = {
    "d_model": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "d_ff": 16, "is_causal": True, "left": 1,
    "right": 1, "dilation": 1, "block": 2, "size": 2, "reach": 1, "width": 4, "stride": 4, "rows": 1, "columns": 1,
    "num_global": 1, "mask": ((True,),),
}  # fmt: skip
KEYS = [0, "k", jnp.zeros(3), jax.random.split(KEY, 3)]


def kinds(hint):
    """The types in an annotation, each with its `Literal`s and without its ranges."""
    if typing.get_origin(hint) is typing.Annotated:
        return kinds(hint.__origin__)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return [kind for part in typing.get_args(hint) for kind in kinds(part)]
    return [hint]


def unfit(hint):
    """Values that an annotation does not allow; none for classes, and for arrays of ints alone."""
    found = kinds(hint)
    if hint in (PRNGKeyArray, PRNGKeyArray | None):
        return KEYS + [None] * (type(None) not in found)
    plain = [kind for kind in found if kind in UNFIT or typing.get_origin(kind) is typing.Literal]
    if all(kind is type(None) or getattr(kind, "dtype", None) in (Float, Bool) for kind in found):
        values = [[[1.0]], 0.5]
    elif len(plain) + (type(None) in found) < len(found):  # an array or a tuple is allowed as well
        values = [] if not plain or str in plain else ["?", True]
        values += [math.nan] * (float in plain)
    else:
        values = UNFIT.get(plain[0], ["?"]) if plain else []
    return values + [None] * (bool(values) and type(None) not in found)


def ranges(hint):
    """The ranges in an annotation."""
    if typing.get_origin(hint) is typing.Annotated:
        return [part for part in hint.__metadata__ if isinstance(part, Range)]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return [part for each in typing.get_args(hint) for part in ranges(each)]
    return []


def outside(hint):
    """Numbers at and beyond the ends of an annotation's range, each with what it must be."""
    for part in ranges(hint):
        ends = [end for end in (part.least, part.most, part.above, part.below) if end is not None]
        for value in sorted({end + step for end in ends for step in (-1, 0, 1)}):
            if complaint := part.complaint(value):
                yield value, complaint


def check_refused(make, hints, given=()):
    """Each value that an annotation does not allow is refused by one line that names the argument."""
    for name, hint in hints.items():
        if name in ("return", "implementation", "scale"):
            continue
        for value, complaint in (*((value, "") for value in unfit(hint)), *outside(hint)):
            with pytest.raises(ValueError, match=rf"^{name} must be .*{complaint}.*, got .*$") as error:
                make(**dict(given, **{name: value}))
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_annotations_of_a_function_say(name):
    check_refused(FUNCTIONS[name], typing.get_type_hints(FUNCTIONS[name], include_extras=True))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_what_annotations_of_a_configuration_say(name):
    kind = CONFIGURATIONS[name]
    hints = typing.get_type_hints(kind, include_extras=True)
    given = {x.name: VALID[x.name] for x in dataclasses.fields(kind) if x.name in VALID}
    check_refused(kind, {x.name: hints[x.name] for x in dataclasses.fields(kind)}, given)


def test_a_list_becomes_a_tuple():
    """Flax hashes configurations."""
    config = brl.MLRConfig(ranks=[4, 4], block_sizes=[None, 8])
    assert hash(config) == hash(brl.MLRConfig(ranks=(4, 4), block_sizes=(None, 8)))
    assert hash(brl.LocalConfig(window=4, pattern="block_mask", block_mask=["10", "11"]))


def test_flags_numbers_and_keys_are_found():
    hints = typing.get_type_hints(brl.sinkhorn_attention, include_extras=True)
    names = ("is_causal", "temperature", "block_size", "rng")
    assert [len(unfit(hints[name])) for name in names] == [4, 5, 6, 4]


#: What makes a state, and its sizes. Calls have 12 tokens, which may all be valid.
STATES = {
    "diag": (brl.init_diag_state, {"block_size": 4}),
    "mlr": (brl.init_mlr_state, {"length": 16, **MLR}),
    "long_short": (brl.init_long_short_state, {"length": 16, "chunk_rank": 2, "window": 3, "chunk_size": 4}),
    "reformer": (brl.init_reformer_state, {"length": 16, "num_rounds": 2, "num_buckets": 4}),
    "sinkhorn": (brl.init_sinkhorn_state, {"length": 12, "block_size": 4}),
    "informer": (brl.init_informer_state, {"length": 16, "factor": 1}),
}
#: States without a count: padding leaves them as they are.
RECURRENT_STATES = {
    "linear": (brl.init_linear_state, {}),
    "norm": (brl.init_linear_state, {"normalize": False}),
    "cosformer": (brl.init_cosformer_state, {}),
    "performer": (brl.init_performer_state, {"num_features": 8}),
    **dict.fromkeys(
        ("delta", "gated_delta", "kimi_delta", "gated_delta_2", "rwkv7"), (brl.init_delta_state, {})
    ),
    "flowformer": (brl.init_flowformer_state, {}),
    "luna": (brl.init_luna_state, {"num_packed": 3}),
    "gau": (brl.init_gau_state, {"length": 16}),
    "mixed_chunk": (brl.init_mixed_chunk_state, {"chunk_size": 4}),
    "bsbr": (brl.init_bsbr_state, {"length": 16, "chunk_size": 4}),
}


def init(name, batch=B, **sizes):
    function, own = (STATES | RECURRENT_STATES)[name]
    return function(batch, N, H, **own | sizes)


MLR_STATE = init("mlr")


def stateful(name, state, **options):
    causal = {"is_causal": True} if name == "informer" else {}  # the others' calls are
    return ours(name, state=state, **causal | options)


#: What every function with a state refuses, and the errors.
WITH_STATES = {
    "count is negative": ({"count": -1}, "count must be from 0 to 12, got -1"),
    "count is too large": ({"count": 99}, "count must be from 0 to 12, got 99"),
    "both directions": (
        {"is_causal": False},
        "state (and return_state must be given with|needs) is_causal=True",
    ),
    "lengths": (
        {"key_value_seq_lengths": np.ones(2, np.int32)},
        "key_value_seq_lengths must be None with a state|state and return_state must be given with is_causal=True",
    ),
    "no named tuple": ({"state": (1, 2)}, "state must be of type .*(State|Cache), got"),
    "no state": ({"state": None, "return_state": True}, "return_state needs a state"),
}


@pytest.mark.parametrize(
    ("name", "case"), [(n, c) for n in STATES for c in WITH_STATES if (n, c) != ("diag", "no state")]
)
def test_states(name, case):
    options, message = WITH_STATES[case]
    with pytest.raises(ValueError, match=message):
        stateful(name, **{"state": init(name)} | options)


@pytest.mark.parametrize("name", STATES | RECURRENT_STATES)
def test_states_of_other_calls(name):
    with pytest.raises(ValueError, match=f"state must be of type {type(init(name)).__name__}"):
        stateful(name, init("mlr" if name == "diag" else "diag"))
    with pytest.raises(ValueError, match=r"state\.\S+ must be .*shape \(2, "):
        stateful(name, init(name, batch=B + 1))


long_short = functools.partial(brl.long_short_attention, Q, K, V, Q[..., :2])


def compress_blocks(lengths=None, keys=K, **options):
    given = {
        "query": jnp.stack([TOKENS] * 4, 1),
        "key": keys,
        "contrast_key": keys,
        "value": keys,
        "gamma": 0.1,
    }
    given |= {"history_lengths": None if lengths is None else jnp.asarray(lengths)}
    return brl.compress_blocks(**given | {"block_size": 3, "history_size": 3} | options)


SIDES = array(2, N, H)


def rotary(right=SIDES[1], **options):
    return brl.local_attention(Q, K, V, **WINDOW, bias=brl.RotaryBias(SIDES[0], right, **options))


BRL = decoder(mechanism=brl.BRLConfig(window=4))
CONFIG = decoder().config
DIMENSIONS = CONFIG.make_dimensions(is_causal=True)


def stack(mechanisms, dimensions=DIMENSIONS):
    return brl.Stack(mechanisms, dimensions).init(KEY, Q[0])


CALLS += [
    # What annotations say, and values that are known.
    (lambda: long_short(norms=(1, 2)), "norms must be of type Norms, got"),
    *(
        (
            lambda window=window: stateful("long_short", init("long_short"), window=window),
            f"window must be 3, as in the state, got {window}",
        )
        for window in (2, 5)
    ),
    (lambda: rotary(theta=-1.0), "theta must be"),
    (lambda: rotary(right=array(N + 1, H)), "left and right of RotaryBias must have one shape"),
    (lambda: local(bias=brl.ALiBi([0.5] * N)), "slopes"),
    (lambda: compress_blocks([0, 99, 0, 0]), r"history_lengths must be from 0 to 3, got \[\[ 0 99"),
    (lambda: compress_blocks([0, -9, 0, 0]), "history_lengths must be"),
    (lambda: compress(axis_name="nope"), "axis_name must be .* got 'nope'"),
    (lambda: brl.performer_attention(Q, K, V, rng=0),
     r"rng must be a random key, such as jax.random.key\(0\), or None, got 0"),
    (lambda: generate(stop_tokens=3), "stop_tokens must be a list, got 3"),
    (lambda: generate(model=brl.DecoderLM, variables=zeros(decoder())), "model must be .* got the class DecoderLM"),
    (lambda: brl.generate_requests(decoder(), zeros(decoder()), None), "requests must be"),
    (lambda: brl.generate_requests(decoder(), zeros(decoder()), brl.Request([1], 2)),
     "requests must be Requests in a list"),
    (lambda: bilinear_mlr(query_weights=None), "query_weights must be a list, got None"),
    (lambda: brl.transnormer("t1", "x"), "kind must be a class of config.* got 'x'"),
    (lambda: brl.local_attention(Q, K, V, local_window_size=(10**12, 0)), "local_window_size must be at most"),
    (lambda: brl.local_attention(Q, K, V, local_window_size=-1), "local_window_size must be at least 0, got -1"),
    (lambda: brl.local_attention(Q, K, V, local_window_size=(3,)), r"must be a tuple of 2, got \(3,\)"),
    (lambda: brl.local_attention(Q, K, V, local_window_size="3"), "must be an integer or a tuple, got '3'"),
    # Networks.
    (lambda: stack(None), "mechanisms and dimensions must be a network's, .* got None and Dimensions"),
    (lambda: stack(("full",)), "mechanisms and dimensions must be .* got .'full',. and Dimensions"),
    (lambda: stack((brl.FullConfig(),), CONFIG), "mechanisms and dimensions must be .* and DecoderConfig"),
    (lambda: run(decoder(), IDS, memory=3), "memory must be"),
    (lambda: run(decoder(), IDS, cache={"a": 1}), "cache must be"),
    (lambda: run(decoder(), IDS, cache=decoder().init_cache(B, 8)), "cache must have as many rows .* 1, got 2"),
    (lambda: run(decoder(), IDS, cache=BRL.init_cache(1, 8)), "cache must be made by init_cache of this model"),
    (lambda: run(BRL, IDS, memory=BRL.init_memory(B)), "memory must have as many rows as the tokens, 1, got 2"),
]  # fmt: skip

SMALL = {"num_layers": 4, "d_model": 64, "num_heads": 4, "d_ff": 16, "mechanism": brl.FullConfig()}
BOTH = {"late_mechanism": brl.DiagConfig(block_size=4)}
SOLO = brl.MECHANISMS["tlinformer"](hidden=0)
BLOCKS_OF_3 = brl.MECHANISMS["tlinformer"](window=4, context=3, hidden=1)
ALONG = {"mechanism": brl.DiagConfig(), "schedule": "parallel"}
#: Configurations whose parts don't fit each other.
REFUSED = [
    ("Stack", {"schedule": "alternate"}, "schedule must be 'split' without a late_mechanism, got 'alternate'"),
    ("Stack", {"early_layers": 1}, "early_layers must be None without a late_mechanism, got 1"),
    ("Stack", {"swap_mechanisms": True}, "swap_mechanisms must be False without a late_mechanism, got True"),
    ("Stack", BOTH | {"early_layers": 5}, "early_layers must be 0 to 4 with schedule 'split' over 4 layers, got 5"),
    ("Stack", BOTH | {"early_layers": 0, "schedule": "alternate"}, "early_layers must be 1 to 3 .*, got 0"),
    ("Stack", BOTH | {"early_layers": 2, "schedule": "parallel"}, "early_layers must be None with schedule 'para"),
    ("Decoder", ALONG | {"late_mechanism": brl.BRLConfig()}, "brl cannot share a layer"),
    ("Decoder", ALONG | {"late_mechanism": brl.BRLConfig(memory="output")}, "brl cannot share a layer"),
    ("Decoder", {"mechanism": BLOCKS_OF_3}, "num_layers must be a multiple of 3, the layers of a block .*, got 4"),
    ("Decoder", {"mechanism": SOLO} | BOTH, "late_mechanism must be None with tlinformer"),
    ("Decoder", {"late_mechanism": SOLO}, "late_mechanism must be None with tlinformer"),
    ("Decoder", {"mechanism": SOLO, "num_heads": 64}, "even head_dim, got d_model / num_heads = 1"),
    ("Decoder", {"mechanism": brl.BRLConfig(), "head_dim": 8},
     r"head_dim must be d_model / num_heads = 16 with mechanism brl, got 8"),
    ("Decoder", {"mechanism": SOLO, "output_norms": True}, "output_norms must be False with mechanism tlinformer"),
    ("Decoder", {"mechanism": None}, "mechanism must be the configuration of a mechanism, .*, got None"),
    ("Decoder", {"mechanism": brl.LocalConfig}, "mechanism must be the configuration .*, got LocalConfig"),
    ("Decoder", {"late_mechanism": "full"}, "late_mechanism must be the configuration .*, got 'full'"),
    ("Decoder", {"mechanism": brl.Mamba2Config(num_groups=5)}, "num_groups must divide the 8 heads of Mamba-2, got 5"),
    ("Decoder", {"mup_base_width": 32, "lora_rank": 2}, "lora_rank must be 0 with mup_base_width, got 2"),
    ("Decoder", {"d_model": 46, "num_heads": 1, "mechanism": brl.BilinearBTTConfig()},
     r"d_model: .*got 46 = 2\*23; the nearest such widths are 45 = 5\*9 and 48 = 6\*8"),
    ("EncoderDecoder", {"lora_rank": 2}, "lora_rank must be 0 in an encoder-decoder, got 2"),
    ("EncoderDecoder", {"positions": "learned"}, "positions must be one of .*, got 'learned'"),
    ("EncoderDecoder", {"reversible": True}, "reversible must be False in an encoder-decoder"),
    ("EncoderDecoder", {"mechanism": brl.DeltaNetConfig()}, "deltanet has no bidirectional form"),
    ("EncoderDecoder", {"encoder_mechanism": "full"}, "encoder_mechanism must be the configuration of a mechanism"),
    ("EncoderDecoder", {"mechanism": brl.LinformerConfig()}, "linformer has no causal form"),
    ("EncoderDecoder", {"mechanism": SOLO, "encoder_mechanism": brl.FullConfig()},
     "tlinformer arranges its layers itself"),
    ("Encoder", {"d_model": 12}, "rotary positions need an even head_dim"),
    ("Graph", {"kinds": (0, -1)}, "kinds must"),
    ("Graph", {"kinds": ()}, "kinds must not be empty"),
    ("Graph", {"identities": True}, "identities must be False with network 'tokens'"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_configurations_that_cannot_be(kind, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(models, f"{kind}Config")(**SMALL | options)


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
        ours(name, positions=jnp.zeros((1, T)))


@pytest.mark.parametrize("name", ["linformer", "sinkhorn", "synthesizer"])
def test_sequences_beyond_max_length(name):
    config = brl.MECHANISMS[name](max_length=8)
    layer = config.layer(dataclasses.replace(DIMENSIONS, is_causal=config.causal))
    calls = [lambda: jax.eval_shape(layer.init, KEY, jnp.ones((1, 9, 16)))]
    for call in calls + [lambda: layer.init_cache(1, 9)] * config.causal:
        with pytest.raises(ValueError, match="max_length must be at least the sequence's length 9, got 8"):
            call()


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
        network(config).init(KEY, *[IDS] * len(needed))


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_call(call, message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        call()
