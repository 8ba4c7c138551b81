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


class Operation(NamedTuple):
    """One operation.

    Attributes:
      function: the library's.
      arrays: the names of its arrays, each followed by a colon and the kind that `draw` knows, unless it is the name.
      oracle: (size, *float64 arrays) -> the float64 result.
      options: size -> the function's further arguments.
      products: size -> operations of the forward pass's matrix products, where they are worth a figure.
    """

    function: Callable[..., Any]
    arrays: str
    oracle: Callable[..., np.ndarray]
    options: Callable[[Size], dict[str, Any]] = lambda z: {"is_causal": True}
    products: Callable[[Size], float] | None = None

    @property
    def kinds(self) -> list[str]:
        """The kinds of the arrays."""
        return [each.rpartition(":")[2] for each in self.arrays.split()]

    def call(self, size: Size, implementation: Implementation | None) -> Callable[..., Any]:
        """The function of the arrays."""
        names = [each.partition(":")[0] for each in self.arrays.split()]
        options = self.options(size)

        def call(*arrays: Any) -> Any:
            return self.function(**dict(zip(names, arrays)), **options, implementation=implementation)

        return call


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
    read = (
        _compress(z, query[:, b], key[:, at], contrast[:, at], value[:, at], gamma)
        for b, at in enumerate(parts)
    )
    return np.stack([*read], 1)


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


def _gau(z: Size, query, key, value) -> np.ndarray:
    i, j = _grid(z.n)
    return _read(np.where(j <= i, np.maximum(_pairs(query, key) / (i + 1), 0) ** 2, 0), value)


def _flash(z: Size, query, key, linear_query, linear_key, value) -> np.ndarray:
    i, j = _grid(z.n)
    near = np.maximum(_pairs(query, key) / 256, 0) ** 2 * ((i // 256 == j // 256) & (j <= i))
    return _read(near + _pairs(linear_query, linear_key) / 256 * (j // 256 < i // 256), value)


def _bsbr(z: Size, query, key, value, far_query, far_key) -> np.ndarray:
    near = _OWN_BLOCK(z, query, key, value)
    first = np.arange(0, z.n, 64)
    last = np.minimum(first + 64, z.n) - 1
    logits = _pairs(far_query[:, first], far_key[:, last]) * z.scale
    weights = _softmax(logits, first[:, None] > first[None])
    scores = _pairs(query, key) * z.scale * np.repeat(np.repeat(weights, 64, 2), 64, 3)[:, :, : z.n, : z.n]
    return near + _read(scores, value)


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


# --- Operations ---


def _delta(z: Size, query, key, value, beta, log_decay=0.0) -> np.ndarray:
    return _recurrence(z, query, key, value, log_decay, beta)


def _full(z: Size) -> float:
    return 2.0 * z.n**2 * z.heads * z.head_dim


def _windowed(z: Size) -> float:
    return 4.0 * z.n * z.window * z.heads * z.head_dim


def _of_few(z: Size) -> float:
    return 8.0 * z.n * z.few * z.heads * z.head_dim


def _local(kinds: str = "", **options: Any) -> Operation:
    def every(z: Size) -> dict[str, Any]:
        return {"pattern": brl_jax.SlidingWindow.of_width(z.window, True), "is_causal": True, **options}

    oracle = _attend(_window, options.get("logits_soft_cap"))
    return Operation(brl_jax.local_attention, f"{_QKV} {kinds}", oracle, every, _windowed)


def _compression(score: Score = "softmax") -> Operation:
    arrays = "query:few key:query contrast_key:query value:query gamma:head"
    oracle = functools.partial(_compress, score=score)
    return Operation(brl_jax.compress, arrays, oracle, lambda z: {"scale": z.scale, "score": score}, _of_few)


def _propagation(score: Score = "softmax") -> Operation:
    products = (lambda z: _of_few(z) / 2) if score == "softmax" else None
    oracle = functools.partial(_propagate, score=score)
    arrays = "query key:few value:few strength:head"
    return Operation(
        brl_jax.propagate, arrays, oracle, lambda z: {"scale": z.scale, "score": score}, products
    )


def _decayed(kind: str) -> Operation:
    options = {"is_causal": True, "normalize": False, "feature_map": "identity"}
    return Operation(brl_jax.linear_attention, f"{_QKV} log_decay:{kind}", _recurrence, lambda z: options)


def _of_delta(function: Callable[..., Any], gates: str) -> Operation:
    return Operation(function, f"{_QKV} {gates}", _delta, lambda z: {})


_QKV = "query key value:key"
_EVERY = _attend(lambda z, i, j: j <= i)
_OWN_BLOCK = _attend(lambda z, i, j: i // 64 == j // 64)
OPERATIONS = {
    "local": _local(),
    "local_packed": _local("segment_ids:segments"),
    "local_sinks": _local("segment_ids:segments sinks:head"),
    "local_capped": _local(logits_soft_cap=2.0),
    "compress": _compression(),
    "compress_relu2": _compression("relu2"),
    "compress_laplace": _compression("laplace"),
    "compress_blocks": Operation(
        brl_jax.compress_blocks, "query:blocks key:query contrast_key:query value:query gamma:head", _compress_blocks,
        lambda z: {"scale": z.scale, "block_size": z.n // 4, "history_size": z.n // 2},
    ),
    "propagate": _propagation(),
    "propagate_relu2": _propagation("relu2"),
    "propagate_laplace": _propagation("laplace"),
    "selected": Operation(
        selected_attention, f"{_QKV} starts", _selected,
        lambda z: {"size": 64, "scale": z.scale, "aligned": True}, lambda z: 2.0 * _windowed(z),
    ),
    "native_sparse": Operation(
        brl_jax.native_sparse_attention, f"{_QKV} compressed_key:means compressed_value:means gates", _native_sparse,
        lambda z: {"window": z.window},
    ),
    "gau": Operation(brl_jax.gau_attention, _QKV, _gau, products=_full),
    "linear": Operation(brl_jax.linear_attention, _QKV, _linear),
    "linear_packed": Operation(brl_jax.linear_attention, f"{_QKV} segment_ids:segments", _linear),
    "norm": Operation(brl_jax.norm_attention, _QKV, _norm),
    "retention": _decayed("slope"),
    "scalar_decay": _decayed("decay"),
    "gla": _decayed("decays"),
    "delta": _of_delta(brl_jax.delta_rule, "beta"),
    "gated_delta": _of_delta(brl_jax.gated_delta_rule, "beta log_decay:decay"),
    "kda": _of_delta(brl_jax.kimi_delta_rule, "beta log_decay:decays"),
    "diag": Operation(
        brl_jax.diag_attention, _QKV, _OWN_BLOCK, products=lambda z: _windowed(z._replace(window=64))
    ),
    "full": Operation(brl_jax.full_attention, _QKV, _EVERY, products=_full),
    "bsbr": Operation(brl_jax.bsbr_attention, f"{_QKV} retrieval_query:query retrieval_key:key", _bsbr),
    "flash": Operation(
        brl_jax.mixed_chunk_attention, "query key linear_query:query linear_key:key value:key", _flash
    ),
}  # fmt: skip


def arrays(name: str, size: Size, dtype: Any, seed: int = 0) -> tuple[np.ndarray, ...]:
    """The arguments of one call."""
    kinds = OPERATIONS[name].kinds
    return tuple(draw(kind, size, dtype, 16 * seed + n) for n, kind in enumerate(kinds))


def cotangent_of(function: Callable[..., Any], arguments: tuple, dtype: Any) -> np.ndarray:
    """A random cotangent of a call's result."""
    shape = jax.eval_shape(function, *arguments).shape
    return np.resize(_pool(15).astype(dtype), shape)  # `arrays` draws from other pools


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
