"""Every attention function against its plain form in its family's `reference.py`: outputs and gradients.

The lengths are not multiples of any chunk or block. tests/laws compares layers with independent references."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax
from brl_jax import RotaryBias
from brl_jax.attention.low_rank.long_short import Norms
from tests.attention.local.cases import PATTERNS, xla_attention
from tests.support.attention import close, random_qkv

B, N, K, H = 2, 4, 2, 8


def normal(*shape):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape) / 2, jnp.float32)


def qkv(length):
    return tuple(random_qkv(length)[:3])


def with_beta(length):
    return *qkv(length), jax.nn.sigmoid(normal(B, length, K))


def with_gates(length):
    """Gates of two shapes for keys of H and values of 5 features."""
    query, key, _ = qkv(length)
    return query, key, normal(B, length, K, 5), *(jax.nn.sigmoid(normal(B, length, K, n)) for n in (H, 5))


def with_removal(length):
    return *qkv(length), normal(B, length, K, H)[..., ::-1], jax.nn.sigmoid(-normal(B, length, K, H))


#: The names of the arrays after query, key and value.
NAMED = {with_beta: ("beta",), with_gates: ("erase", "write"), with_removal: ("removal_key", "learning_rate")}


def with_projection(length):
    return *qkv(length), normal(B, length, K, 3)


def mixed(length):
    query, key, value = qkv(length)
    return query, key, normal(B, length, N, H), -2 * key, value


def retrieving(length):
    query, key, value = qkv(length)
    return query, key, value, normal(B, length, N, H), -2 * key


def tokens(length):
    return normal(B, length, 12), normal(B, length, K, 5)


def query_and_value(length):
    return qkv(length)[::2]


def value_alone(length):
    return qkv(length)[2:]


def with_sort_logits(length):
    """For blocks of 24 tokens."""
    return *qkv(length), normal(B, -(-length // 24), K, -(-length // 24))


def rotations(length):
    return brl_jax.reformer_rotations(jax.random.key(0), H, num_rounds=3, num_buckets=4)


def compressing(sizes):
    """Queries, keys and values, the means of blocks of both, and gates."""

    def arrays(length):
        query, key, value = qkv(length)
        means = (brl_jax.compression_blocks(x, sizes).mean(2) for x in (key, value))
        return query, key, value, *means, normal(B, length, N, 3)

    return arrays


def few_read_many(length):
    return normal(B, 3, N, H), normal(B, length, N, H), -normal(B, length, N, H), normal(B, length, N, 5)


def blocks_read_many(length):
    return normal(B, 4, 3, N, H), *(sign * normal(B, 34, N, H) for sign in (1, -1, 2))


def many_read_few(length):
    return normal(B, length, N, H), normal(B, 3, N, H), normal(B, 3, N, 5)


def levels(heads):
    return [normal(2**level, 12 // 2**level, heads, 3 - level) for level in range(3)]


# Strong and weak decays next to each other, and tokens that empty the state.
DECAYS = -np.asarray([0.01, 1e3, 0.1, 20.0, 0.0, np.inf, 0.5], np.float32)


def head_decay(length):
    return jnp.asarray(DECAYS[[0, 3]])


def token_decay(length):
    return jnp.broadcast_to(DECAYS[np.arange(length) % 7][None, :, None], (B, length, K))


def feature_decay(length):
    """Different tokens empty different features."""
    return jnp.stack([jnp.roll(token_decay(length), shift, 1) for shift in range(H)], -1)


def both(**options):
    """Causal and not."""
    return [options | {"is_causal": causal} for causal in (True, False)]


DECAYED = {"is_causal": True, "normalize": False, "feature_map": "identity"}
BIAS = RotaryBias(normal(N, H), normal(N, H) / 2)
SAMPLES = jnp.asarray(np.random.default_rng(0).random(20), jnp.float32)
NORMS = Norms(normal(K, H), normal(K, H) + 1)
SCORES = ("softmax", "relu2", "laplace")
ORDERS = ("ascending", "descending", "interleaved", "max_exchange")
BLOCK_SIZES = [
    brl_jax.BlockSizes(*sizes) for sizes in ((4, 2, 4, 5), (6, 2, 4, 4), (2, 2, 8, 4), (3, 3, 3, 2))
]
# By family: the function, its arrays for a length, and the options of several cases. An option that is a function is
# called with the length.
CASES = {
    "dense": [
        ("full_attention", qkv, both(scale=0.3)),
        ("hopfield_attention", qkv, both(steps=3, scale=1.0)),
        ("kernelized_attention", qkv, [{"scale": 0.3}]),
    ],
    "local": [
        ("diag_attention", qkv, [*both(block_size=7), {"block_size": 999, "is_causal": True}]),
        ("diag_attention", qkv, both(block_size=7, score="relu", scale=0.3)),
    ],
    "low_rank": [
        (
            "linformer_attention", qkv,
            [{"key_projection": normal(6, 140), "value_projection": normal(6, 150), "scale": 0.3}],
        ),
        ("nystromformer_attention", qkv, [{"num_landmarks": 7}]),
        ("nystromformer_attention", qkv, [{"iterations": 3, "scale": 0.2, "value_kernel": normal(N, 5)}]),
        ("skyformer_attention", qkv, [{"samples": SAMPLES}]),
        ("skyformer_attention", qkv, [{"samples": SAMPLES[:5], "ridge": 0.5, "scale": 0.2}]),
        ("long_short_attention", with_projection, [{"window": 6, "positions": lambda n: jnp.arange(n)[None] + 5}]),
        ("long_short_attention", with_projection, [{"window": 6, "chunk_size": 5, "is_causal": True, "norms": NORMS}]),
        ("long_short_attention", with_projection, [{"window": 7, "chunk_size": 150, "is_causal": True}]),
    ],
    "structured": [
        ("mlr_attention", qkv, both(ranks=(4, 2, 2), block_sizes=(None, 24, 8))),
        ("mlr_attention", qkv, both(ranks=(5, 3), block_sizes=(40, 10))),
        ("bilinear_mlr_attention", tokens, both(query_weights=levels(N), key_weights=levels(K))),
        ("bilinear_btt_attention", tokens, both(right=normal(3, 4, N, 4, 2), left=normal(N, 4, 3, 3, 2))),
        ("global_window_attention", qkv, both(ranks=(3, 5), window=6)),
    ],
    "recurrent": [
        ("linear_attention", qkv, both()),
        ("linear_attention", qkv, both(normalize=False, feature_map="elu")),
        ("linear_attention", qkv, both(positions=lambda n: jnp.asarray([[5], [1000]]) + jnp.arange(n)[None])),
        *(
            ("linear_attention", qkv, [DECAYED | {"log_decay": decay}])
            for decay in (head_decay, token_decay, feature_decay)
        ),
        ("norm_attention", qkv, both(norm="layer", feature_map="elu")),
        ("norm_attention", qkv, both(norm_scale=normal(N, H), positions=lambda n: jnp.arange(n)[None])),
        ("performer_attention", qkv, both(projection=lambda n: brl_jax.performer_projection(jax.random.key(0), 12, H))),
        ("cosformer_attention", qkv, both(max_length=211)),
        ("flowformer_attention", qkv, both(positions=lambda n: jnp.arange(n)[None])),
        ("luna_attention", qkv, [{"packed": normal(3, K, H)}]),
        ("delta_rule", with_beta, [{}]),
        ("gated_delta_rule", with_beta, [{"log_decay": token_decay}]),
        ("kimi_delta_rule", with_beta, [{"log_decay": feature_decay}]),
        ("gated_delta_rule_2", with_gates, [{"log_decay": feature_decay}]),
        ("rwkv7_attention", with_removal, [{"log_decay": feature_decay}]),
        ("gau_attention", qkv, both(bias=BIAS)),
        ("mixed_chunk_attention", mixed, both(bias=BIAS, chunk_size=24)),
        ("bsbr_attention", retrieving, both(chunk_size=24)),
        (
            "bsbr_attention", retrieving,
            both(chunk_size=24, compression=(normal(H, H, 5) / 4, 2 * normal(5, H, H)), strength=normal(N))[:1],
        ),
    ],
    "sorting": [
        ("informer_attention", qkv, both(factor=2, scale=0.3, rng=jax.random.key(0))),
        ("reformer_attention", query_and_value, both(rotations=rotations, chunk_size=5, scale=1.5)),
        (
            "sinkhorn_attention", with_sort_logits,
            both(block_size=24, iterations=3, temperature=0.6, scale=0.3),
        ),
        ("sliceformer_attention", value_alone, [{"order": order} for order in ORDERS]),
        *(
            ("native_sparse_attention", compressing(sizes), [{"sizes": sizes, "window": 3}])
            for sizes in BLOCK_SIZES
        ),
    ],
    "compressed": [
        ("compress", few_read_many, [{"gamma": normal(N), "score": score} for score in SCORES]),
        ("compress_blocks", blocks_read_many, [{"gamma": normal(N), "block_size": 7, "history_size": 13}]),
        ("propagate", many_read_few, [{"strength": normal(N), "score": score} for score in SCORES]),
    ],
}  # fmt: skip
# Options that plain forms don't have. Skyformer's plain form uses the exact inverse, which twelve steps reach.
OURS = {"skyformer_attention": {"iterations": 12}}
OURS |= {name: {"implementation": "xla"} for name in ("compress", "compress_blocks", "propagate")}
TOLERANCES = {"low_rank": 1e-4, "sorting": 1e-5}
RECURRENT = ("linear_attention", "delta_rule", "kimi_delta_rule", "gated_delta_rule_2", "rwkv7_attention")
OURS |= {name: {"chunk_size": 24} for name in RECURRENT}
# Fast on a GPU's platform: a sum of outer products, decays, triangular systems, and chunks with weights of their own.
FAST_ON_GPU = ("linear_attention", "gated_delta_rule", "mixed_chunk_attention")
EACH = [
    pytest.param(
        family, name, arrays, options, number == 0, platform, id=f"{name}-{number}-{platform}",
        marks=pytest.mark.slow if platform == "cuda" and name not in FAST_ON_GPU else (),
    )
    for family, cases in CASES.items()
    for name, arrays, several in cases
    for number, options in enumerate(several)
    for platform in (("cpu", "cuda") if family == "recurrent" else ("cpu",))
]  # fmt: skip
EACH = pytest.mark.parametrize(
    ("family", "name", "arrays", "options", "first", "platform"), EACH, indirect=["platform"]
)


def run(family, name, arrays, options, length, gradients, dtype=jnp.float32):
    """The results of our function, on arrays of this dtype, and of the plain form: each an output with the gradients of
    all arrays."""
    options = {
        key: value(length) if callable(value) and key != "bias" else value for key, value in options.items()
    }
    plain = importlib.import_module(f"brl_jax.attention.{family}.reference")
    given = arrays(length)

    def results(function, dtype=jnp.float32, **more):
        def loss(*given):
            given = [x.astype(dtype) for x in given]
            names = NAMED.get(arrays, ())
            named = dict(zip(names, given[3:])) if names else {}
            out = function(*given[: 3 if names else None], **named, **options, **more)
            out = out.astype(jnp.float32)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)), out

        if not gradients or family == "sorting":  # whose plain forms use NumPy
            return loss(*given)[1], ()
        pulled, out = jax.grad(loss, argnums=range(len(given)), has_aux=True)(*given)
        return out, pulled

    ours, theirs = getattr(brl_jax, name), getattr(plain, name)
    if family == "sorting":
        return jax.jit(lambda: results(ours))(), results(theirs)
    return jax.jit(lambda: (results(ours, dtype, **OURS.get(name, {})), results(theirs)))()


@EACH
def test_equals_its_plain_form(family, name, arrays, options, first, platform):
    """Gradients of a function's first case; the slow test below takes those of all cases."""
    (out, got), (expected, wanted) = run(family, name, arrays, options, 67, first)
    close(out, expected, TOLERANCES.get(family, 2e-5))
    for a, b in zip(got, wanted, strict=True):
        close(a, b, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 130])
@EACH
def test_gradients_at_other_lengths(family, name, arrays, options, first, platform, length):
    (out, got), (expected, wanted) = run(family, name, arrays, options, length, True)
    close(out, expected, 1e-5 if family == "sorting" else 1e-4)
    # A single token has weight 1 whatever its query, whose gradient is 0 up to rounding.
    rounding = 1e-6 * max((float(jnp.linalg.norm(b)) for b in wanted), default=0.0)
    for a, b in zip(got, wanted, strict=True):
        if length > 1 or float(jnp.linalg.norm(a - b)) > rounding:
            close(a, b, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "cuda"], indirect=True)
@pytest.mark.parametrize(("name", "arrays", "options"), [
    (name, arrays, several[0]) for name, arrays, several in CASES["recurrent"] if arrays not in NAMED
])  # fmt: skip
def test_bfloat16(name, arrays, options, platform):
    (out, got), (expected, wanted) = run("recurrent", name, arrays, options, 130, True, jnp.bfloat16)
    for a, b in zip((out, *got), (expected, *wanted), strict=True):
        close(a, b, 2e-2)


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_equal_their_plain_form(name):
    pattern, _ = PATTERNS[name]
    segments = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (2, 130)), axis=1), jnp.int32)
    options = {
        "pattern": pattern,
        "is_causal": pattern.causal_ok,
        "scale": 0.3,
        "segment_ids": (segments, segments),
    }
    options["key_value_seq_lengths"] = jnp.asarray([130, 77])
    plain = importlib.import_module("brl_jax.attention.local.reference").local_attention(*qkv(130), **options)
    close(xla_attention(*qkv(130), **options), plain)


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

    def loss(log_decay, *given):
        named = dict(zip(NAMED.get(arrays, ()), given[3:]))
        out = getattr(brl_jax, name)(*given[:3], **named, log_decay=log_decay, chunk_size=24, **options)
        return jnp.sum(jnp.sin(out))

    decay, given = feature_decay(67), arrays(67)
    gradients = jax.jit(jax.grad(loss, range(1 + len(given))))(decay, *given)
    assert all(bool(jnp.isfinite(gradient).all()) for gradient in gradients)
    assert not np.asarray(gradients[0])[np.isinf(decay)].any()
    assert np.asarray(gradients[0])[np.asarray(decay) > -1].any()
