"""The recurrent functions' form for GPUs, which computes all chunks at once; run on a CPU."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax
from brl_jax.attention.recurrent import squared_relu
from tests.marks import slow_unless
from tests.oracles.parts import FEATURES, each_head, relu, sigmoid
from tests.oracles.recurrent import bsbr, decayed, delta, gated_delta_2, gau, mixed_chunk, rotary_side, rwkv7
from tests.support.attention import check, close

# On a CPU, XLA of JAX 0.10.2 once crashed in the gradient of decays by feature ("feature_decayed", GLA) with 8 or more
# chunks and 8 or more features. Nobody could repeat it; 4 features stay below that size.
HEADS, KV_HEADS, SIZE, CHUNK = 4, 2, 4, 16
PAST, MIDDLE, REST = 21, 150, 5  # 150 tokens are 10 chunks, so both even and odd numbers of chunks are joined
DIRECTIONS = np.random.default_rng(0).standard_normal((7, SIZE))


def _performer_features(x):
    x = x * SIZE**-0.25
    return np.exp(x @ DIRECTIONS.T - (x * x).sum(-1, keepdims=True) / 2)


def _largest(x):
    return np.take_along_axis(x, x.real.argmax(-1)[..., None], -1)


def _linear(q, k, seen):
    return _normalized(FEATURES["elu+1"](q) @ FEATURES["elu+1"](k).T, seen)


def _cosformer(q, k, seen):
    i = np.arange(len(q))
    cosine = np.cos((i[:, None] - i) * math.pi / 1024)
    return _normalized(relu(q) @ relu(k).T * cosine, seen, 1e-6)


def _performer(q, k, seen):
    rows = _performer_features(q)
    return _normalized((rows + 1e-6 * _largest(rows)) @ _performer_features(k).T, seen)


def _normalized(weights, seen, least=0.0):
    weights = weights * seen
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total.real > least, total, least or 1)


def _log_decay(beta):
    """From almost no decay to an almost empty state."""
    return -20 * beta**4


STRENGTHS = np.array([0.001, 1.0, 0.1, 5.0])  # how strongly each feature decays


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True))


def _mixed(q, k, seen):
    chunk = np.arange(len(q)) // CHUNK
    near, scores = chunk[:, None] == chunk, q @ k.T / CHUNK
    return np.where(near & seen, relu(scores) ** 2, np.where(near, 0, -scores * seen))


def oracle(name, query, key, value, beta, segments):
    """(n, N, V) in float64 for a row without padding; complex inputs give directional derivatives."""
    n = len(query)
    seen = np.tri(n, dtype=bool) & (segments[:, None] == segments)
    out = []
    for head in range(HEADS):
        q, k, v, b = query[:, head], *(x[:, head * KV_HEADS // HEADS] for x in (key, value, beta))
        if name in ("decayed", "feature_decayed"):
            each = STRENGTHS if name == "feature_decayed" else np.ones(SIZE)
            out.append(decayed(q, k, v, np.exp(_log_decay(b)[:, None] * each), segments))
            continue
        by_feature = np.exp(_log_decay(b)[:, None] * STRENGTHS)
        if name == "gated_2":
            out.append(gated_delta_2(q, unit(k), v, sigmoid(2 * v), sigmoid(k), by_feature, segments))
            continue
        if name == "rwkv7":
            out.append(rwkv7(q, k, v, unit(k + v), sigmoid(2 * v), by_feature, segments))
            continue
        weigh = {"linear": _linear, "cosformer": _cosformer, "performer": _performer, "mixed": _mixed}
        decays = {"delta": None, "gated": np.exp(_log_decay(b)), "kimi": by_feature}
        out.append(
            delta(q, unit(k), v, b, decays[name], segments) if name in decays else weigh[name](q, k, seen) @ v
        )
    return np.stack(out, 1)


def call(name, query, key, value, beta, **options):
    match name:
        case "linear":
            return brl_jax.linear_attention(query, key, value, is_causal=True, **options)
        case "cosformer":
            return brl_jax.cosformer_attention(query, key, value, max_length=512, is_causal=True, **options)
        case "performer":
            directions = jnp.asarray(DIRECTIONS, jnp.float32)
            return brl_jax.performer_attention(
                query, key, value, projection=directions, is_causal=True, **options
            )
        case "decayed" | "feature_decayed":
            decay = _log_decay(beta.astype(jnp.float32))
            decay = decay[..., None] * STRENGTHS[None, None, None] if name == "feature_decayed" else decay
            options |= {"normalize": False, "feature_map": "identity", "log_decay": decay}
            return brl_jax.linear_attention(query, key, value, is_causal=True, **options)
        case "delta":
            return brl_jax.delta_rule(query, key, value, beta=beta, **options)
        case "gated":
            decay = _log_decay(beta.astype(jnp.float32))
            return brl_jax.gated_delta_rule(query, key, value, beta=beta, log_decay=decay, **options)
        case "kimi":
            decay = _log_decay(beta.astype(jnp.float32))[..., None] * STRENGTHS[None, None, None]
            return brl_jax.kimi_delta_rule(query, key, value, beta=beta, log_decay=decay, **options)
        case "gated_2" | "rwkv7":
            options["log_decay"] = (
                _log_decay(beta.astype(jnp.float32))[..., None] * STRENGTHS[None, None, None]
            )
            gate = jax.nn.sigmoid(2 * value)
            if name == "rwkv7":
                options |= {"removal_key": key + value, "learning_rate": gate}
                return brl_jax.rwkv7_attention(query, key, value, **options)
            write = jax.nn.sigmoid(key)
            return brl_jax.gated_delta_rule_2(query, key, value, erase=gate, write=write, **options)
    return brl_jax.mixed_chunk_attention(query, key, -query, key, value, is_causal=True, **options)


def with_states(name, arrays, ids, lengths):
    """The outputs of three pieces, the second with segments and lengths. A function without states runs only the
    second."""
    cuts = list(itertools.pairwise(np.cumsum([0, PAST, MIDDLE, REST])))
    past, middle, rest = ([x[:, a:b] for x in arrays] for a, b in cuts)
    options = {"key_value_seq_lengths": lengths, "chunk_size": CHUNK}
    if name == "mixed":
        return [call(name, *middle, **options)]
    first, state = call(name, *past, return_state=True, chunk_size=CHUNK)
    second, state = call(name, *middle, state=state, return_state=True, segment_ids=ids, **options)
    return [first, second, call(name, *rest, state=state)]


SLOW = ("cosformer", "performer", "feature_decayed", "kimi", "gated_2", "rwkv7")
NAMES = (
    "linear", "cosformer", "performer", "decayed", "feature_decayed", "delta", "gated", "kimi", "gated_2", "rwkv7",
    "mixed",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in NAMES],
)
def test_oracle(name, all_at_once):
    """Outputs and gradients equal the float64 oracle: states before and after, segments, lengths, grouped heads."""
    rng = np.random.default_rng(1)
    total = PAST + MIDDLE + REST
    shapes = [(2, total, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    arrays = [rng.standard_normal(shape) for shape in shapes] + [rng.random((2, total, KV_HEADS))]
    changes = [rng.standard_normal(x.shape) for x in arrays]
    lengths, ids = (MIDDLE, 107), np.searchsorted([30, 31, 64, 133], np.arange(MIDDLE), side="right")
    shapes = [(2, n, HEADS, SIZE) for n in (PAST, MIDDLE, REST)]
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    weights[1] *= np.arange(MIDDLE)[None, :, None, None] < np.array(lengths)[:, None, None, None]

    def expected(step):
        """The outputs, 0 in padding, at arrays + step * changes."""
        moved = [x + step * c for x, c in zip(arrays, changes)]
        outs = [np.zeros((2, n, HEADS, SIZE), complex) for n in (PAST, MIDDLE, REST)]
        for row, length in enumerate(lengths):
            end = PAST + length
            if name == "mixed":
                outs[1][row, :length] = oracle(name, *(x[row, PAST:end] for x in moved), np.zeros(length))
                continue
            tokens = [np.concatenate([x[row, :end], x[row, PAST + MIDDLE :]]) for x in moved]
            last = ids[length - 1]
            segments = np.concatenate([np.zeros(PAST), ids[:length], np.full(REST, last)])
            out = oracle(name, *tokens, segments)
            outs[0][row], outs[1][row, :length], outs[2][row] = out[:PAST], out[PAST:end], out[end:]
        return outs[1:2] if name == "mixed" else outs

    @functools.partial(jax.jit, static_argnums=0)
    def run(dtype, *arrays):
        def loss(*arrays):
            cast = [x.astype(dtype) for x in arrays]
            outs = with_states(name, cast, jnp.broadcast_to(ids, (2, MIDDLE)), jnp.asarray(lengths))
            kept = weights[1:2] if name == "mixed" else weights
            masked = [jnp.where(w != 0, o.astype(jnp.float32), 0) for o, w in zip(outs, kept)]
            return sum(jnp.sum(o * w) for o, w in zip(masked, kept)), masked

        return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)

    outs = expected(0)
    kept = weights[1:2] if name == "mixed" else weights
    slopes = [o.imag * 1e20 for o in expected(1e-20j)]
    slope = sum(np.sum(w * s) for w, s in zip(kept, slopes))
    scale = math.sqrt(sum(np.sum((w * s) ** 2) for w, s in zip(kept, slopes)))
    inputs = [jnp.asarray(x, jnp.float32) for x in arrays]
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)):
        gradients, got = run(dtype, *inputs)
        for ours, theirs in zip(got, outs):
            close(ours, theirs.real, tolerance)
        ours = sum(np.sum(np.asarray(g, np.float64) * c) for g, c in zip(gradients, changes))
        assert abs(ours - slope) <= tolerance * scale


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "performer"])
def test_both_directions_see_their_segment(name, all_at_once):
    """Without causality, chunks of packed sequences are scanned in both directions."""
    rng = np.random.default_rng(2)
    arrays = [rng.standard_normal((1, 70, heads, SIZE)) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    query, key, value = (jnp.asarray(x, jnp.float32) for x in arrays)
    cuts = [0, 9, 40, 70]
    ids = jnp.repeat(jnp.arange(3), jnp.diff(jnp.asarray(cuts)), total_repeat_length=70)[None]
    function = {
        "linear": brl_jax.linear_attention,
        "performer": functools.partial(
            brl_jax.performer_attention, projection=jnp.asarray(DIRECTIONS, jnp.float32)
        ),
    }[name]
    got = jax.jit(functools.partial(function, chunk_size=8))(query, key, value, segment_ids=ids)
    for a, b in itertools.pairwise(cuts):
        close(got[:, a:b], function(*(x[:, a:b] for x in (query, key, value))))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flash", "bsbr", "bsbr_compressed"])
def test_a_prompt_is_read_at_once(name, all_at_once):
    """Pieces that begin and end inside chunks, with padding, equal the whole sequences."""
    rng = np.random.default_rng(6)
    total, lengths = PAST + MIDDLE + REST, (MIDDLE, 107)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    arrays = [draw(2, total, heads, SIZE) for heads in (HEADS, KV_HEADS, HEADS, KV_HEADS, KV_HEADS)]
    options = {"is_causal": True, "chunk_size": CHUNK}
    if name == "flash":
        sides = draw(HEADS, SIZE), draw(HEADS, SIZE)
        attend = functools.partial(
            brl_jax.mixed_chunk_attention, bias=brl_jax.RotaryBias(*map(jnp.asarray, sides))
        )
        state = brl_jax.init_mixed_chunk_state(2, KV_HEADS, SIZE, SIZE, chunk_size=CHUNK)

        def oracle(*row):
            rotated = (rotary_side(np.float64(side), len(row[0])) for side in sides)
            return each_head(mixed_chunk)(*row, *rotated, **options)
    else:
        arrays = [arrays[i] for i in (0, 1, 4, 2, 3)]
        own, compressed = {"strength": draw(HEADS)}, None
        if name == "bsbr_compressed":
            compressed = 3
            own |= {"compression": (draw(SIZE, SIZE, 3), draw(3, SIZE, SIZE))}
        attend = functools.partial(
            brl_jax.bsbr_attention, implementation="xla", **jax.tree.map(jnp.asarray, own)
        )
        oracle = functools.partial(bsbr, **jax.tree.map(np.float64, own), **options)
        state = brl_jax.init_bsbr_state(
            2, KV_HEADS, SIZE, length=total, num_heads=HEADS, num_compressed=compressed, chunk_size=CHUNK
        )

    def exist(x):
        return [x[r, [*range(PAST + n), *range(PAST + MIDDLE, total)]] for r, n in enumerate(lengths)]

    def pieces(state, *arrays):
        outs = []
        for a, b, ends in ((0, PAST, None), (PAST, PAST + MIDDLE, lengths), (PAST + MIDDLE, total, None)):
            out, state = attend(
                *(x[:, a:b] for x in arrays), state=state, return_state=True,
                key_value_seq_lengths=None if ends is None else jnp.asarray(ends), **options,
            )  # fmt: skip
            outs.append(out)
        return jnp.concatenate(exist(jnp.concatenate(outs, 1)))

    def whole(*arrays):
        return np.concatenate([oracle(*row) for row in zip(*(exist(x) for x in arrays))])

    assert "stablehlo.while" not in jax.jit(pieces).lower(state, *arrays).as_text()
    check(functools.partial(pieces, state), whole, [np.float64(x) for x in arrays])


@pytest.mark.parametrize(("platform", "loops"), [("cuda", False), ("cpu", True)])
def test_the_platform_decides_how_bsbr_reads_a_prompt(platform, loops):
    state = brl_jax.init_bsbr_state(1, KV_HEADS, SIZE, length=96, num_heads=HEADS, chunk_size=CHUNK)
    arrays = [
        jax.ShapeDtypeStruct((1, 64, heads, SIZE), jnp.float32) for heads in (HEADS, *[KV_HEADS] * 2) * 2
    ]
    attend = functools.partial(
        brl_jax.bsbr_attention, is_causal=True, return_state=True, chunk_size=CHUNK, implementation="xla"
    )
    traced = jax.jit(lambda *x: attend(*x[:5], state=state)).trace(*arrays)
    assert ("stablehlo.while" in traced.lower(lowering_platforms=(platform,)).as_text()) == loops


def test_gau_takes_many_queries_at_once(all_at_once, monkeypatch):
    """Takes 24 queries per piece, since they fit in memory, although 8 are requested."""
    rng = np.random.default_rng(4)
    arrays = [rng.standard_normal((2, 70, heads, SIZE)) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    query, key, value = (jnp.asarray(x, jnp.float32) for x in arrays)
    monkeypatch.setattr(squared_relu, "_GPU_SCORES", 2 * HEADS * 70 * 24)
    attend = functools.partial(brl_jax.gau_attention, is_causal=True, chunk_size=8)
    text = str(jax.make_jaxpr(functools.partial(attend, implementation="xla"))(query, key, value))
    assert "length=3" in text
    none = np.zeros((70, HEADS, 1))
    expected = [each_head(gau)(*row, none, none, is_causal=True) for row in zip(*arrays)]
    close(jax.jit(attend)(query, key, value), expected)


@pytest.mark.parametrize(("platform", "loops"), [("cuda", False), ("cpu", True), ("tpu", True)])
@pytest.mark.parametrize("name", slow_unless(NAMES, {*NAMES} - {"kimi"}))
def test_the_platform_that_a_call_is_lowered_for_decides(name, platform, loops):
    shapes = [(1, 96, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)] + [(1, 96, KV_HEADS)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    traced = jax.jit(functools.partial(call, name, chunk_size=CHUNK)).trace(*arrays)
    assert ("stablehlo.while" in traced.lower(lowering_platforms=(platform,)).as_text()) == loops


@pytest.mark.slow
def test_long_products_of_the_delta_rule_stay_precise(all_at_once):
    """The joined float32 maps of 4,096 chunks, against the recurrence in float64."""
    rng = np.random.default_rng(3)
    length = 2**15
    query, key, value = rng.standard_normal((3, 1, length, 1, SIZE))
    beta = rng.random((1, length, 1))
    *inputs, strengths = (jnp.asarray(x, jnp.float32) for x in (query, key, value, beta))
    got = jax.jit(functools.partial(brl_jax.delta_rule, chunk_size=8))(*inputs, beta=strengths)
    close(got[0, :, 0], delta(query[0, :, 0], unit(key[0, :, 0]), value[0, :, 0], beta[0, :, 0]))
