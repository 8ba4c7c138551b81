"""The operations that `eval.gpu_check` runs: their inputs, the library's calls, and float64 forms of them in NumPy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import brl_jax
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.scores import Score
from brl_jax.attention.sorting.selected import selected_attention


class Size(NamedTuple):
    """The shapes of one call."""

    n: int = 16384
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int = 128
    few: int = 128
    window: int = 256
    batch: int = 1

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


Call = Callable[[Size, Implementation | None], Callable[..., Any]]


class Operation(NamedTuple):
    """One operation.

    Attributes:
      arguments: the kinds of its arrays, as `draw` names them.
      call: (size, implementation) -> f(*arrays).
      oracle: (size, *float64 arrays) -> the float64 result.
      products: size -> operations of the forward pass's matrix products, where they are worth a figure.
    """

    arguments: str
    call: Call
    oracle: Callable[..., np.ndarray]
    products: Callable[[Size], float] | None = None


# --- Inputs ---


@functools.cache
def _pool(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(1 << 21, np.float32)


def draw(kind: str, size: Size, dtype: Any, seed: int) -> np.ndarray:
    """An array of one kind. Large ones repeat two million random numbers: drawing them all would take seconds."""
    z, length = size, size.n
    shapes = {
        "query": (z.batch, length, z.heads, z.head_dim),
        "key": (z.batch, length, z.kv, z.head_dim),
        "few": (z.batch, z.few, z.heads, z.head_dim),
        "blocks": (z.batch, 3, z.few, z.heads, z.head_dim),
        "means": (z.batch, max((length - 32) // 16 + 1, 0), z.kv, z.head_dim),
        "gates": (z.batch, length, z.heads, 3),
        "head": (z.heads,),
        "beta": (z.batch, length, z.kv),
        "decay": (z.batch, length, z.kv),
        "decays": (z.batch, length, z.kv, z.head_dim),
        "slope": (z.kv,),
    }
    if kind == "segments":
        cuts = np.linspace(0, length, 5)[1:-1].astype(int) + 3
        return np.broadcast_to(np.searchsorted(cuts, np.arange(length), "right"), (z.batch, length)).astype(
            "i4"
        )
    if (
        kind == "starts"
    ):  # the first keys of each token's own block of 64, of block 0 and of earlier ones: 16 at most
        own, blocks = np.arange(length)[:, None] // 64, -(-length // 64)
        others = np.tile(np.arange(1, blocks), (length, 1))
        places = np.random.default_rng(seed).permuted(others, axis=1)[:, :14]
        places = np.concatenate([own, np.zeros_like(own), places], 1)
        repeated = (places >= own) & (np.arange(places.shape[1]) > 0)
        starts = np.where(repeated, length, places * 64).astype("i4")
        return np.broadcast_to(starts[None, :, None], (z.batch, length, z.kv, starts.shape[1])).copy()
    shape = shapes[kind]
    count = math.prod(shape)
    base = _pool(seed)[: max(1, min(count, 1 << 21))]
    if kind == "beta":
        return np.resize(1 / (1 + np.exp(-base)), shape)
    if kind in (
        "decay",
        "decays",
        "slope",
    ):  # from a state that hardly fades to one that is gone in a few tokens
        return np.resize(-np.exp(2.0 * np.clip(base, -2, 1) - 2.0), shape)
    if kind == "head":
        return np.resize(0.2 + np.abs(base), shape)
    return np.resize(base.astype(dtype), shape)


# --- Float64 forms; arrays are (B, n, N, H) ---


def _wide(x: np.ndarray, heads: int) -> np.ndarray:
    return np.repeat(x, heads // x.shape[2], axis=2) if x.shape[2] != heads else x


def _pairs(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    return query.swapaxes(1, 2) @ _wide(key, query.shape[2]).transpose(0, 2, 3, 1)


def _read(weights: np.ndarray, value: np.ndarray) -> np.ndarray:
    return (weights @ _wide(value, weights.shape[1]).swapaxes(1, 2)).swapaxes(1, 2)


def _softmax(scores: np.ndarray, seen: Any, sinks: Any = -np.inf) -> np.ndarray:
    scores = np.where(seen, scores, -np.inf)
    top = np.maximum(np.maximum(scores.max(-1, keepdims=True), sinks), -1e300)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + np.exp(sinks - top)
    return weights / np.where(total > 0, total, 1.0)


def _weights(scores: np.ndarray, score: str) -> np.ndarray:
    if score == "softmax":
        return _softmax(scores, True)
    if score == "relu2":
        return np.maximum(scores, 0) ** 2
    return 0.5 + 0.5 * np.vectorize(math.erf)((scores - math.sqrt(0.5)) * math.sqrt(2 * math.pi))


def _grid(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(n)[:, None], np.arange(n)[None]


def _attend(seen: Callable, cap: float | None = None) -> Callable[..., np.ndarray]:
    """Causal softmax attention to the keys that seen(size, i, j) names, with segments and sinks where given."""

    def oracle(
        z: Size, query: Any, key: Any, value: Any, segments: Any = None, sinks: Any = None
    ) -> np.ndarray:
        i, j = _grid(z.n)
        visible = ((j <= i) & seen(z, i, j))[None, None]
        if segments is not None:
            visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
        scores = z.scale * _pairs(query, key)
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        return _read(_softmax(scores, visible, -np.inf if sinks is None else sinks[:, None, None]), value)

    return oracle


def _window(z: Size, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    return i - j < z.window


def _compress(z: Size, query, key, contrast, value, gamma, score="softmax") -> np.ndarray:
    first, second = (_read(_weights(z.scale * _pairs(query, x), score), value) for x in (key, contrast))
    return first - gamma[:, None] * second


def _compress_blocks(z: Size, query, key, contrast, value, gamma) -> np.ndarray:
    step, history = z.n // 4, z.n // 2
    parts = [slice(block * step, block * step + history) for block in range(3)]
    return np.stack(
        [
            _compress(z, query[:, b], key[:, at], contrast[:, at], value[:, at], gamma)
            for b, at in enumerate(parts)
        ],
        1,
    )


def _propagate(z: Size, query, key, value, strength, score="softmax") -> np.ndarray:
    return strength[:, None] * _read(_weights(z.scale * _pairs(query, key), score), value)


def _features(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def _linear(z: Size, query, key, value, segments=None, normalize=True) -> np.ndarray:
    i, j = _grid(z.n)
    visible = (j <= i)[None, None]
    if segments is not None:
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    weights = np.where(visible, _pairs(_features(query), _features(key)), 0.0)
    return _read(weights / weights.sum(-1, keepdims=True) if normalize else weights, value)


def _norm(z: Size, query, key, value) -> np.ndarray:
    sums = _linear(z, query, key, value, normalize=False)
    return sums / np.sqrt((sums**2).mean((2, 3), keepdims=True) + 1e-5)


def _recurrence(z: Size, query, key, value, log_decay=0.0, beta=None) -> np.ndarray:
    """S <- exp(log_decay) S, then S + k v^T, or with beta the delta rule with keys of length 1; token by token."""
    log_decay = np.asarray(log_decay, np.float64)
    log_decay = log_decay if log_decay.ndim > 1 else np.broadcast_to(log_decay, (z.batch, z.n, z.kv))
    log_decay = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    decay, value = np.exp(_wide(log_decay, z.heads))[..., None], _wide(value, z.heads)
    if beta is not None:
        key = key / np.sqrt((key**2).sum(-1, keepdims=True) + 1e-12)
        beta = np.repeat(beta, z.heads // z.kv, axis=2)
    key = _wide(key, z.heads)
    state, out = np.zeros((z.batch, z.heads, z.head_dim, value.shape[3])), np.empty_like(value)
    for t in range(z.n):
        state, k, v = decay[:, t] * state, key[:, t, :, :, None], value[:, t, :, None]
        if beta is not None:
            v = beta[:, t, :, None, None] * (v - k.swapaxes(2, 3) @ state)
        state = state + k * v
        out[:, t] = (query[:, t, :, None] @ state)[:, :, 0]
    return out


def _flow(z: Size, query, key, value) -> np.ndarray:
    i, j = _grid(z.n)
    query, key = (1 / (1 + np.exp(-x)) for x in (query, _wide(key, z.heads)))
    seen, number = j <= i, np.arange(1.0, z.n + 1)
    pairs = _pairs(query, key)
    forward, back = np.where(seen, pairs, 0), np.where(seen, pairs.swapaxes(2, 3), 0)
    incoming, outgoing = forward.sum(-1) / number, back.sum(-1) / number
    sinks = (forward @ (1 / outgoing)[..., None])[..., 0] / number
    sources = np.exp((back @ (1 / incoming)[..., None])[..., 0] / number)
    shares = number * sources / np.cumsum(sources, -1)
    weights = forward * (1 / (1 + np.exp(-sinks)) / (incoming * number))[..., None] * shares[:, :, None]
    return _read(weights, value)


def _gau(z: Size, query, key, value) -> np.ndarray:
    i, j = _grid(z.n)
    return _read(np.where(j <= i, np.maximum(_pairs(query, key) / (i + 1), 0) ** 2, 0), value)


def _flash(z: Size, query, key, linear_query, linear_key, value) -> np.ndarray:
    i, j = _grid(z.n)
    near = np.maximum(_pairs(query, key) / 256, 0) ** 2 * ((i // 256 == j // 256) & (j <= i))
    return _read(near + _pairs(linear_query, linear_key) / 256 * (j // 256 < i // 256), value)


def _bsbr(z: Size, query, key, value, far_query, far_key) -> np.ndarray:
    near = _attend(lambda z, i, j: i // 64 == j // 64)(z, query, key, value)
    first = np.arange(0, z.n, 64)
    last = np.minimum(first + 64, z.n) - 1
    logits = _pairs(far_query[:, first], far_key[:, last]) * z.scale
    weights = _softmax(logits, first[:, None] > first[None])
    scores = _pairs(query, key) * z.scale * np.repeat(np.repeat(weights, 64, 2), 64, 3)[:, :, : z.n, : z.n]
    return near + _read(scores, value)


def _ranks(z: Size) -> tuple[int, ...]:
    return tuple(share * z.head_dim // 16 for share in (8, 2, 2, 2, 1, 1))


def _mlr(z: Size, query, key, value) -> np.ndarray:
    i, j = _grid(z.n)
    scores: np.ndarray = np.zeros(())
    start, ranks = 0, _ranks(z)
    for level, rank in enumerate(ranks):
        block = -(-z.n // 2 ** (len(ranks) - 1)) * 2 ** (len(ranks) - 1 - level)
        features = slice(start, start := start + rank)
        scores = scores + (i // block == j // block) / rank * _pairs(query[..., features], key[..., features])
    return _read(_softmax(scores, j <= i), value)


def _selected(z: Size, query, key, value, starts) -> np.ndarray:
    i, j = _grid(z.n)
    seen = ((starts[..., None] <= j) & (j < starts[..., None] + 64)).any(3)  # (B, T, K, S)
    seen = np.repeat(seen.swapaxes(1, 2), z.heads // z.kv, 1) & (j <= i)
    return _read(_softmax(z.scale * _pairs(query, key), seen), value)


def _native_sparse(z: Size, query, key, value, short_key, short_value, gates) -> np.ndarray:
    """Of so few tokens that every block is chosen."""
    i, _ = _grid(z.n)
    far = np.arange(short_key.shape[1])[None] * 16 + 32 <= i + 1
    parts = (
        _read(_softmax(z.scale * _pairs(query, short_key), far), short_value),
        *(_attend(seen)(z, query, key, value) for seen in (lambda z, i, j: j <= i, _window)),
    )
    return sum(gates[..., n, None] * part for n, part in enumerate(parts))


# --- The library's calls ---


def _of(name: str, **options: Any) -> Call:
    return lambda z, implementation: functools.partial(
        getattr(brl_jax, name), implementation=implementation, **options
    )


def _of_delta(name: str) -> Call:
    def make(z: Size, implementation: Implementation | None) -> Callable[..., Any]:
        def call(query: Any, key: Any, value: Any, *gates: Any) -> Any:
            named = dict(zip(("beta", "log_decay"), gates))
            return getattr(brl_jax, name)(query, key, value, **named, implementation=implementation)

        return call

    return make


def _of_local(**options: Any) -> Call:
    def make(z: Size, implementation: Implementation | None) -> Callable[..., Any]:
        def call(query: Any, key: Any, value: Any, segments: Any = None, sinks: Any = None) -> Any:
            return brl_jax.local_attention(
                query, key, value, pattern=brl_jax.SlidingWindow.of_width(z.window, True), is_causal=True,
                segment_ids=segments, sinks=sinks, implementation=implementation, **options,
            )  # fmt: skip

        return call

    return make


def _of_compress(score: Score = "softmax") -> Call:
    return lambda z, i: (
        lambda q, k, c, v, g: brl_jax.compress(
            q, k, c, v, gamma=g, scale=z.scale, score=score, implementation=i
        )
    )


def _of_blocks(z: Size, implementation: Implementation | None) -> Callable[..., Any]:
    return lambda q, k, c, v, g: brl_jax.compress_blocks(
        q,
        k,
        c,
        v,
        gamma=g,
        scale=z.scale,
        block_size=z.n // 4,
        history_size=z.n // 2,
        implementation=implementation,
    )


def _of_propagate(score: Score = "softmax") -> Call:
    return lambda z, i: (
        lambda q, k, v, s: brl_jax.propagate(
            q, k, v, strength=s, scale=z.scale, score=score, implementation=i
        )
    )


def _decayed(z: Size, implementation: Implementation | None) -> Callable[..., Any]:
    return lambda q, k, v, log: brl_jax.linear_attention(
        q,
        k,
        v,
        log_decay=log,
        is_causal=True,
        normalize=False,
        feature_map="identity",
        implementation=implementation,
    )


def _packed(z: Size, implementation: Implementation | None) -> Callable[..., Any]:
    return lambda q, k, v, ids: brl_jax.linear_attention(
        q, k, v, segment_ids=ids, is_causal=True, implementation=implementation
    )


def _of_selected(z: Size, implementation: Implementation | None) -> Callable[..., Any]:
    return functools.partial(
        selected_attention, size=64, scale=z.scale, aligned=True, implementation=implementation
    )


def _of_native_sparse(z: Size, implementation: Implementation | None) -> Callable[..., Any]:
    return functools.partial(brl_jax.native_sparse_attention, window=z.window, implementation=implementation)


def _of_mlr(z: Size, implementation: Implementation | None) -> Callable[..., Any]:
    return functools.partial(
        brl_jax.mlr_attention, ranks=_ranks(z), is_causal=True, implementation=implementation
    )


def _delta(z: Size, query, key, value, beta, log_decay=0.0) -> np.ndarray:
    return _recurrence(z, query, key, value, log_decay, beta)


def _full(z: Size) -> float:
    return 2.0 * z.n**2 * z.heads * z.head_dim


_LOCAL, _WINDOWED = "query key key", lambda z: 4.0 * z.n * z.window * z.heads * z.head_dim
_HISTORY, _FEW = "few query query query head", lambda z: 8.0 * z.n * z.few * z.heads * z.head_dim
_EVERY = _attend(lambda z, i, j: j <= i)
OPERATIONS = {
    "local": Operation(_LOCAL, _of_local(), _attend(_window), _WINDOWED),
    "local_packed": Operation(f"{_LOCAL} segments", _of_local(), _attend(_window), _WINDOWED),
    "local_sinks": Operation(f"{_LOCAL} segments head", _of_local(), _attend(_window), _WINDOWED),
    "local_capped": Operation(_LOCAL, _of_local(logits_soft_cap=2.0), _attend(_window, 2.0), _WINDOWED),
    "compress": Operation(_HISTORY, _of_compress(), _compress, _FEW),
    "compress_relu2": Operation(_HISTORY, _of_compress("relu2"), functools.partial(_compress, score="relu2"), _FEW),
    "compress_laplace": Operation(
        _HISTORY, _of_compress("laplace"), functools.partial(_compress, score="laplace"), _FEW
    ),
    "compress_blocks": Operation("blocks query query query head", _of_blocks, _compress_blocks),
    "propagate": Operation("query few few head", _of_propagate(), _propagate, lambda z: _FEW(z) / 2),
    "propagate_relu2": Operation(
        "query few few head", _of_propagate("relu2"), functools.partial(_propagate, score="relu2")
    ),
    "propagate_laplace": Operation(
        "query few few head", _of_propagate("laplace"), functools.partial(_propagate, score="laplace")
    ),
    "selected": Operation("query key key starts", _of_selected, _selected, lambda z: 2.0 * _WINDOWED(z)),
    "native_sparse": Operation("query key key means means gates", _of_native_sparse, _native_sparse),
    "gau": Operation(_LOCAL, _of("gau_attention", is_causal=True), _gau, _full),
    "linear": Operation(_LOCAL, _of("linear_attention", is_causal=True), _linear),
    "linear_packed": Operation(f"{_LOCAL} segments", _packed, _linear),
    "norm": Operation(_LOCAL, _of("norm_attention", is_causal=True), _norm),
    "retention": Operation(f"{_LOCAL} slope", _decayed, _recurrence),
    "scalar_decay": Operation(f"{_LOCAL} decay", _decayed, _recurrence),
    "gla": Operation(f"{_LOCAL} decays", _decayed, _recurrence),
    "delta": Operation(f"{_LOCAL} beta", _of_delta("delta_rule"), _delta),
    "gated_delta": Operation(f"{_LOCAL} beta decay", _of_delta("gated_delta_rule"), _delta),
    "kda": Operation(f"{_LOCAL} beta decays", _of_delta("kimi_delta_rule"), _delta),
    "flow": Operation(_LOCAL, _of("flowformer_attention", is_causal=True), _flow),
    "diag": Operation(
        _LOCAL, _of("diag_attention", is_causal=True), _attend(lambda z, i, j: i // 64 == j // 64),
        lambda z: _WINDOWED(z._replace(window=64)),
    ),
    "hopfield": Operation(_LOCAL, _of("hopfield_attention", is_causal=True), _EVERY, _full),
    "full": Operation(_LOCAL, _of("full_attention", is_causal=True), _EVERY, _full),
    "bsbr": Operation("query key key query key", _of("bsbr_attention", is_causal=True), _bsbr),
    "flash": Operation("query key query key key", _of("mixed_chunk_attention", is_causal=True), _flash),
    "mlr": Operation(_LOCAL, _of_mlr, _mlr, _full),
}  # fmt: skip


def arrays(name: str, size: Size, dtype: Any, seed: int = 0) -> tuple[np.ndarray, ...]:
    """The arguments of one call."""
    return tuple(
        draw(kind, size, dtype, 16 * seed + n) for n, kind in enumerate(OPERATIONS[name].arguments.split())
    )


def cotangent_of(function: Callable[..., Any], arguments: tuple, dtype: Any, seed: int) -> np.ndarray:
    """A random cotangent of a call's result."""
    shape = jax.eval_shape(function, *arguments).shape
    return np.resize(_pool(seed).astype(dtype), shape)


def training_step(size: Size) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of gradient descent of a two-layer BRL decoder, and its arguments: parameters and tokens."""
    config = brl_jax.DecoderConfig(
        mechanism=brl_jax.BRLConfig(), num_layers=2, d_model=size.heads * size.head_dim, num_heads=size.heads,
        vocab_size=256, dtype="bfloat16",
    )  # fmt: skip
    model = brl_jax.DecoderLM(config)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (size.batch, size.n)), jnp.int32)
    parameters = jax.jit(model.init)(jax.random.key(0), tokens[:, :64])

    def loss(parameters: Any, tokens: Any) -> Any:
        logits, _ = model.apply(parameters, tokens)
        logits = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], 2))

    def step(parameters: Any, tokens: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(parameters, tokens)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), parameters, gradient)

    return step, (parameters, tokens)
