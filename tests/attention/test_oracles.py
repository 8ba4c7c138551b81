"""Every attention function against its float64 oracle: outputs, and gradients along random directions.

The lengths are not multiples of any chunk or block. tests/attention/compressed has compression, and tests/laws compares
layers with whole networks of the oracles."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax
from brl_jax import RotaryBias
from brl_jax.attention.low_rank.long_short import Norms
from tests.attention.local.cases import PATTERNS, xla_attention
from tests.oracles import dense, local, low_rank, recurrent, sorting, structured
from tests.oracles.attention import pairs
from tests.oracles.parts import each_head
from tests.support.attention import assert_close, check, expect, random_qkv

B, N, K, H = 2, 4, 2, 8


def normal(*shape):
    """float64 numbers that float32 has, too."""
    return (np.random.default_rng(shape).standard_normal(shape) / 2).astype(np.float32).astype(np.float64)


def shares(*shape):
    return 1 / (1 + np.exp(-normal(*shape)))


def qkv(length):
    return {
        "query": normal(B, length, N, H),
        "key": normal(B, length, K, H),
        "value": -normal(B, length, K, H)[::-1],
    }


def with_beta(length):
    return qkv(length) | {"beta": shares(B, length, K)}


def with_gates(length):
    """Gates of two shapes for keys of H and values of 5 features."""
    gates = {"erase": shares(B, length, K, H), "write": shares(B, length, K, 5)}
    return qkv(length) | {"value": normal(B, length, K, 5)} | gates


def with_removal(length):
    removal = normal(B, length, K, H)[..., ::-1]
    return qkv(length) | {"removal_key": removal, "learning_rate": shares(B, length, K, H)}


def with_projection(length):
    return qkv(length) | {"projection": normal(B, length, K, 3)}


def mixed(length):
    arrays = qkv(length)
    linear = {"linear_query": normal(B, length, N, H)[..., ::-1], "linear_key": -2 * arrays["key"]}
    return {"query": arrays["query"], "key": arrays["key"]} | linear | {"value": arrays["value"]}


def retrieving(length):
    retrieval = {
        "retrieval_query": normal(B, length, N, H)[..., ::-1],
        "retrieval_key": -2 * normal(B, length, K, H),
    }
    return qkv(length) | retrieval


def tokens(length):
    return {"x": normal(B, length, 12), "value": normal(B, length, K, 5)}


def query_and_value(length):
    return {name: x for name, x in qkv(length).items() if name != "key"}


def value_alone(length):
    return {"value": normal(B, length, K, H)}


def with_sort_logits(length):
    """For blocks of 24 tokens."""
    blocks = -(-length // 24)
    return qkv(length) | {"sort_logits": normal(B, blocks, K, blocks)}


def synthesized(length):
    return {"value": normal(B, length, K, 5), "rows": normal(B, length, N, 3)}


def compressing(sizes):
    """Queries, keys and values, the means of blocks of both, and gates."""

    def arrays(length):
        given = qkv(length)
        means = {
            f"compressed_{name}": np.asarray(
                brl_jax.compression_blocks(jnp.float32(given[name]), sizes).mean(2), float
            )
            for name in ("key", "value")
        }
        return given | means | {"gates": normal(B, length, N, 3)}

    return arrays


def levels(heads):
    return [normal(2**level, 12 // 2**level, heads, 3 - level) for level in range(3)]


# Strong and weak decays next to each other, and tokens that empty the state.
DECAYS = -np.asarray([0.01, 1e3, 0.1, 20.0, 0.0, np.inf, 0.5], np.float32)


def head_decay(length):
    return np.asarray(DECAYS[[0, 3]])


def token_decay(length):
    return np.broadcast_to(DECAYS[np.arange(length) % 7][None, :, None], (B, length, K))


def feature_decay(length):
    """Different tokens empty different features."""
    return np.stack([np.roll(token_decay(length), shift, 1) for shift in range(H)], -1)


def decaying_sums(query, key, value, *, log_decay, is_causal, normalize, feature_map):
    decay = np.exp(log_decay)
    if decay.ndim == 1:
        decay = np.broadcast_to(decay, key.shape[:2])
    return each_head(recurrent.decayed)(query, key, value, decay)


def delta_rule(query, key, value, beta, *, log_decay=None):
    decay = None if log_decay is None else np.exp(log_decay)
    gates = (beta,) if decay is None else (beta, decay)
    return each_head(recurrent.delta)(query, recurrent.length_1(key), value, *gates)


def gated_delta_rule_2(query, key, value, erase, write, *, log_decay):
    arrays = recurrent.length_1(key), value, erase, write, np.exp(log_decay)
    return each_head(recurrent.gated_delta_2)(query, *arrays)


def rwkv7(query, key, value, removal_key, learning_rate, *, log_decay):
    arrays = key, value, recurrent.length_1(removal_key), learning_rate, np.exp(log_decay)
    return each_head(recurrent.rwkv7)(query, *arrays)


def with_rotary_bias(attend):
    def biased(*arrays, bias, **options):
        sides = (
            recurrent.rotary_side(np.asarray(x, np.float64), len(arrays[0])) for x in (bias.left, bias.right)
        )
        return each_head(attend)(*arrays, *sides, **options)

    return biased


def both(**options):
    """Causal and not."""
    return [options | {"is_causal": causal} for causal in (True, False)]


DECAYED = {"is_causal": True, "normalize": False, "feature_map": "identity"}
BIAS = RotaryBias(jnp.float32(normal(N, H)), jnp.float32(normal(N, H) / 2))
SAMPLES = np.random.default_rng(0).random(20).astype(np.float32)
NORMS = Norms(normal(K, H), normal(K, H) + 1)
PROJECTION = np.asarray(brl_jax.performer_projection(jax.random.key(0), 12, H))
ROTATIONS = np.asarray(brl_jax.reformer_rotations(jax.random.key(0), H, num_rounds=3, num_buckets=4))
ORDERS = ("ascending", "descending", "interleaved", "max_exchange")
BLOCK_SIZES = [
    brl_jax.BlockSizes(*sizes) for sizes in ((4, 2, 4, 5), (6, 2, 4, 4), (2, 2, 8, 4), (3, 3, 3, 2))
]
# The function, its oracle for one sequence, the arrays for a length, and the options of several cases. An option that
# is a function is called with the length.
CASES = [
    ("full_attention", dense.hopfield, qkv, both(scale=0.3)),
    ("hopfield_attention", dense.hopfield, qkv, both(steps=3, scale=1.0)),
    ("kernelized_attention", dense.kernelized, qkv, [{"scale": 0.3}]),
    (
        "synthesizer_attention", dense.synthesizer, synthesized,
        both(columns=normal(150, N, 3), column_bias=normal(150, N)),
    ),
    ("diag_attention", local.diag, qkv, [*both(block_size=7), {"block_size": 999, "is_causal": True}]),
    ("diag_attention", local.diag, qkv, both(block_size=7, score="relu", scale=0.3)),
    (
        "linformer_attention", low_rank.linformer, qkv,
        [{"key_projection": normal(6, 140), "value_projection": normal(6, 150), "scale": 0.3}],
    ),
    ("nystromformer_attention", low_rank.nystromformer, qkv, [{"num_landmarks": 7}]),
    (
        "nystromformer_attention", low_rank.nystromformer, qkv,
        [{"num_landmarks": 128, "iterations": 3, "scale": 0.2, "value_kernel": normal(N, 5)}],
    ),
    ("skyformer_attention", low_rank.skyformer, qkv, [{"samples": SAMPLES, "iterations": 6}]),
    (
        "skyformer_attention", low_rank.skyformer, qkv,
        [{"samples": SAMPLES[:5], "iterations": 12, "ridge": 0.5, "scale": 0.2}],
    ),
    (
        "long_short_attention", low_rank.long_short, with_projection,
        [{"window": 6, "positions": lambda n: np.arange(n)[None] + 5}],
    ),
    (
        "long_short_attention", low_rank.long_short, with_projection,
        [
            {"window": 6, "chunk_size": 5, "is_causal": True, "norms": NORMS},
            {"window": 7, "chunk_size": 150, "is_causal": True},
        ],
    ),
    ("mlr_attention", structured.mlr, qkv, both(ranks=(4, 2, 2), block_sizes=(None, 24, 8))),
    ("mlr_attention", structured.mlr, qkv, both(ranks=(5, 3), block_sizes=(40, 10))),
    ("bilinear_mlr_attention", structured.bilinear_mlr, tokens, both(query_weights=levels(N), key_weights=levels(K))),
    (
        "bilinear_btt_attention", structured.bilinear_btt, tokens,
        both(right=normal(3, 4, N, 4, 2), left=normal(N, 4, 3, 3, 2)),
    ),
    ("global_window_attention", structured.global_window, qkv, both(ranks=(3, 5), window=6)),
    ("linear_attention", recurrent.linear, qkv, both()),
    ("linear_attention", recurrent.linear, qkv, both(normalize=False, feature_map="elu")),
    (
        "linear_attention", recurrent.linear, qkv,
        both(positions=lambda n: np.asarray([[5], [1000]]) + np.arange(n)[None]),
    ),
    *(
        ("linear_attention", decaying_sums, qkv, [DECAYED | {"log_decay": decay}])
        for decay in (head_decay, token_decay, feature_decay)
    ),
    ("norm_attention", recurrent.norm_attention, qkv, both(norm="layer", feature_map="elu")),
    (
        "norm_attention", recurrent.norm_attention, qkv,
        both(norm_scale=normal(N, H), positions=lambda n: np.arange(n)[None]),
    ),
    ("performer_attention", recurrent.performer, qkv, both(projection=PROJECTION)),
    ("cosformer_attention", recurrent.cosformer, qkv, both(max_length=211)),
    ("flowformer_attention", recurrent.flowformer, qkv, both(positions=lambda n: np.arange(n)[None])),
    ("luna_attention", recurrent.luna_causal, qkv, [{"packed": normal(3, K, H)}]),
    ("delta_rule", delta_rule, with_beta, [{}]),
    ("gated_delta_rule", delta_rule, with_beta, [{"log_decay": token_decay}]),
    ("kimi_delta_rule", delta_rule, with_beta, [{"log_decay": feature_decay}]),
    ("gated_delta_rule_2", gated_delta_rule_2, with_gates, [{"log_decay": feature_decay}]),
    ("rwkv7_attention", rwkv7, with_removal, [{"log_decay": feature_decay}]),
    ("gau_attention", with_rotary_bias(recurrent.gau), qkv, both(bias=BIAS)),
    ("mixed_chunk_attention", with_rotary_bias(recurrent.mixed_chunk), mixed, both(bias=BIAS, chunk_size=24)),
    ("bsbr_attention", recurrent.bsbr, retrieving, both(chunk_size=24)),
    (
        "bsbr_attention", recurrent.bsbr, retrieving,
        both(chunk_size=24, compression=(normal(H, H, 5) / 4, 2 * normal(5, H, H)), strength=normal(N))[:1],
    ),
    ("informer_attention", sorting.informer, qkv, both(factor=2, scale=0.3, rng=jax.random.key(0))),
    ("reformer_attention", sorting.reformer, query_and_value, both(rotations=ROTATIONS, chunk_size=5, scale=1.5)),
    (
        "sinkhorn_attention", sorting.sinkhorn, with_sort_logits,
        both(block_size=24, iterations=3, temperature=0.6, scale=0.3),
    ),
    ("sliceformer_attention", sorting.sliceformer, value_alone, [{"order": order} for order in ORDERS]),
    *(
        ("native_sparse_attention", sorting.native_sparse, compressing(sizes), [{"sizes": sizes, "window": 3}])
        for sizes in BLOCK_SIZES
    ),
]  # fmt: skip
# The oracles have no chunks.
OF_CHUNKS = ("linear_attention", "delta_rule", "kimi_delta_rule", "gated_delta_rule_2", "rwkv7_attention")
OURS = {name: {"chunk_size": 24} for name in OF_CHUNKS}
OF_RECURRENCES = [case for case in CASES if ".recurrent." in getattr(brl_jax, case[0]).__module__]
# One of each kind in the fast part: a sum of outer products, triangular systems with decays, weights inside chunks.
FAST_ON_GPU = ("linear_attention", "gated_delta_rule", "mixed_chunk_attention")
each = pytest.mark.parametrize(
    ("name", "oracle", "arrays", "options", "platform"),
    [
        pytest.param(
            name, oracle, arrays, options, platform, id=f"{name}-{number}-{platform}",
            marks=pytest.mark.slow if platform == "cuda" and name not in FAST_ON_GPU else (),
        )
        for platform, cases in (("cpu", CASES), ("cuda", OF_RECURRENCES))
        for name, oracle, arrays, several in cases
        for number, options in enumerate(several)
    ],
    indirect=["platform"],
)  # fmt: skip
# Options with a row for each sequence, or one for all.
BY_ROW = ("positions", "log_decay")


def compare(name, oracle, arrays, options, length, dtype=jnp.float32, **tolerances):
    arrays = {key: np.asarray(jnp.asarray(x, dtype), np.float64) for key, x in arrays(length).items()}
    options = {
        key: value(length) if isinstance(value, types.FunctionType) else value
        for key, value in options.items()
    }
    ours = jax.tree.map(
        lambda x: (
            jnp.asarray(x, jnp.float32 if x.dtype.kind == "f" else jnp.int32)
            if isinstance(x, np.ndarray)
            else x
        ),
        options,
    )

    def function(*operands):
        given = dict(zip(arrays, (x.astype(dtype) for x in operands)))
        positional = [given.pop(key) for key in tuple(given)[:2]]
        out = getattr(brl_jax, name)(*positional, **given, **ours, **OURS.get(name, {}))
        return out.astype(jnp.float32)

    def row(b, operands):
        own = {
            key: value[b % len(value)] if key in BY_ROW and np.ndim(value) > 1 else value
            for key, value in options.items()
        }
        return oracle(*(x[b] for x in operands), **own)

    check(
        function,
        lambda *operands: np.stack([row(b, operands) for b in range(B)]),
        [*arrays.values()],
        **tolerances,
    )


@each
def test_equals_its_oracle(name, oracle, arrays, options, platform):
    compare(name, oracle, arrays, options, 67)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 130])
@each
def test_other_lengths(name, oracle, arrays, options, length, platform):
    compare(name, oracle, arrays, options, length)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "cuda"], indirect=True)
@pytest.mark.parametrize(("name", "oracle", "arrays", "several"), OF_RECURRENCES)
def test_bfloat16(name, oracle, arrays, several, platform):
    compare(name, oracle, arrays, several[0], 130, jnp.bfloat16, tolerance=2e-2, of_output=2e-2)


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_with_segments_and_lengths(name):
    pattern, sees = PATTERNS[name]
    arrays = random_qkv(130)
    segments, lengths = (
        np.sort(np.random.default_rng(0).integers(0, 3, (2, 130)), axis=1),
        np.asarray([130, 77]),
    )
    visible = pairs(130, 130, sees, is_causal=pattern.causal_ok) & (segments[:, :, None] == segments[:, None])
    visible = (visible & (np.arange(130) < lengths[:, None])[:, None])[:, None]
    segments = jnp.asarray(segments, jnp.int32)
    options = {"is_causal": pattern.causal_ok, "segment_ids": (segments, segments), "scale": 0.3}
    out = xla_attention(*arrays[:3], pattern=pattern, key_value_seq_lengths=jnp.asarray(lengths), **options)
    assert_close([out], expect(arrays, visible, scale=0.3))


@pytest.mark.parametrize(
    ("name", "arrays", "options"),
    [
        ("linear_attention", qkv, DECAYED),
        ("gated_delta_rule_2", with_gates, {}),
        ("rwkv7_attention", with_removal, {}),
    ],
)
def test_tokens_that_empty_a_state_have_finite_gradients(name, arrays, options):
    """-inf next to almost no decay; -inf gets no gradient, since nothing of the state is left."""

    def loss(log_decay, given):
        out = getattr(brl_jax, name)(**given, log_decay=log_decay, chunk_size=24, **options)
        return jnp.sum(jnp.sin(out))

    decay, given = feature_decay(67), jax.tree.map(jnp.float32, arrays(67))
    of_decay, others = jax.jit(jax.grad(loss, (0, 1)))(decay, given)
    assert all(bool(jnp.isfinite(gradient).all()) for gradient in (of_decay, *others.values()))
    assert not np.asarray(of_decay)[np.isinf(decay)].any()
    assert np.asarray(of_decay)[decay > -1].any()
