"""Bare attention functions, ours and PyTorch's, each checked against a float64 reference on a sample of rows."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brl_jax.attention.dense.full import full_attention
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.diag import diag_attention
from brl_jax.attention.local.patterns import SlidingWindow
from brl_jax.attention.recurrent.delta import delta_rule, gated_delta_rule, kimi_delta_rule
from brl_jax.attention.recurrent.linear import linear_attention
from brl_jax.attention.structured.mlr import mlr_attention
from brl_jax.layers import MLRConfig
from eval.harness.passes import both_passes
from eval.speed.measure import Candidate, Case, NoNumber, Program, compile_program
from eval.speed.options import SpeedOptions
from eval.speed.references import (
    BETA,
    LOG_DECAY,
    Arrays,
    Level,
    attention_reference,
    recurrence_reference,
)


@dataclasses.dataclass(frozen=True)
class FunctionCase:
    """An attention function to time.

    Attributes:
      function: (options, query, key, value) -> out.
      reference: (options, arrays, rows, tail) -> float64 out[:, rows], d_query[:, rows], d_key[:, tail:] and
        d_value[:, tail:].
      growth: the power of the length that its time grows with.
    """

    function: Callable[..., Any]
    reference: Callable[[SpeedOptions, Arrays, np.ndarray, int], tuple[np.ndarray, ...]]
    growth: int


def _causal(function: Callable) -> Callable:
    return lambda options, *arrays: function(*arrays, is_causal=True)


def _local(options: SpeedOptions, *arrays: jax.Array) -> Any:
    pattern = SlidingWindow.of_width(options.window, is_causal=True)
    return local_attention(*arrays, pattern=pattern, is_causal=True)


def _mlr_ranks(options: SpeedOptions) -> tuple[int, ...]:
    return MLRConfig().level_ranks(options.head_dim)


def _mlr_levels(options: SpeedOptions, length: int) -> list[Level]:
    """Level l has 2^l blocks, the first l being 0 (rounded as `doubling_block_sizes` says)."""
    levels, start = [], 0
    ranks = _mlr_ranks(options)
    for level, rank in enumerate(ranks):
        size = -(-length // 2 ** (len(ranks) - 1)) * 2 ** (len(ranks) - 1 - level)
        same = functools.partial(lambda size, i, j: i // size == j // size, size)
        levels.append(Level(slice(start, start + rank), 1 / rank, same))
        start += rank
    return levels


def _mlr(options: SpeedOptions, *arrays: jax.Array) -> Any:
    return mlr_attention(*arrays, ranks=_mlr_ranks(options), is_causal=True)


def _mlr_dense(options: SpeedOptions, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
    """MLR attention by its matrix of scores, level by level, for comparison with its form in rectangles."""
    place = jnp.arange(key.shape[1])
    scores: Any = 0.0
    for features, scale, holds in _mlr_levels(options, key.shape[1]):
        level = scale * jnp.einsum("btnh,bsnh->bnts", query[..., features], key[..., features])
        scores = scores + jnp.where(holds(place[:, None], place[None, :])[None, None], level, 0.0)
    visible = (place[:, None] >= place[None, :])[None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores.astype(jnp.float32), -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights.astype(value.dtype), value)


def _slopes(options: SpeedOptions) -> np.ndarray:
    """RetNet's."""
    return np.log1p(-(2.0 ** (-5.0 - np.arange(options.heads))))[:, None]


def _constant_decay(options: SpeedOptions) -> np.ndarray:
    return np.full((options.heads, 1), LOG_DECAY)


def _feature_decays(options: SpeedOptions) -> np.ndarray:
    """Ranges from a state that keeps a feature to one that forgets it within a few tokens."""
    return np.broadcast_to(-np.geomspace(1e-3, 1.0, options.head_dim), (options.heads, options.head_dim))


def _recurrence(
    function: Callable, log_decay: Callable | None = None, *, tokens: bool = True, delta: bool = True
) -> FunctionCase:
    """A recurrence with the delta rule or without, whose state decays by (heads, 1) or (heads, features) before each
    token. The decay is given for each token or once."""

    def attend(options: SpeedOptions, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        gates = {"beta": jnp.full(key.shape[:3], BETA, key.dtype)} if delta else {}
        if log_decay is not None:
            log = jnp.asarray(log_decay(options), jnp.float32)
            log = log[:, 0] if log.shape[1] == 1 else log
            log = jnp.broadcast_to(log[None, None], (*key.shape[:2], *log.shape)) if tokens else log
            gates["log_decay"] = log
        return function(query, key, value, **gates)

    def reference(
        options: SpeedOptions, arrays: Arrays, rows: np.ndarray, tail: int
    ) -> tuple[np.ndarray, ...]:
        decay = 0.0 if log_decay is None else log_decay(options)
        return recurrence_reference(arrays, rows, tail, decay, delta=delta)

    return FunctionCase(attend, reference, growth=1)


def _scan(*, delta: bool) -> Callable:
    """The delta rule, or GLA's recurrence, token by token, for comparison with their chunked forms."""

    def attend(options: SpeedOptions, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        query, key, value = (x.astype(jnp.float32).swapaxes(0, 1) for x in (query, key, value))
        if delta:
            key = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
        decay = jnp.exp(jnp.asarray(_feature_decays(options), jnp.float32))[None, ..., None]

        def step(state: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
            q, k, v = token
            if delta:
                error = v - jnp.einsum("bnfh,bnf->bnh", state, k)
                state = state + BETA * k[..., None] * error[..., None, :]
            else:
                state = decay * state + k[..., None] * v[..., None, :]
            return state, jnp.einsum("bnfh,bnf->bnh", state, q)

        _, batch, heads, size = key.shape
        start = jnp.zeros((batch, heads, size, value.shape[-1]))
        return jax.lax.scan(step, start, (query, key, value))[1].swapaxes(0, 1).astype(options.dtype)

    return attend


_FULL_REFERENCE = attention_reference(lambda options, i, j: j <= i)
_LOCAL_REFERENCE = attention_reference(lambda options, i, j: (j <= i) & (i - j < options.window))
_DIAG_REFERENCE = attention_reference(lambda options, i, j: (j <= i) & (i // 64 == j // 64))
_MLR_REFERENCE = attention_reference(lambda options, i, j: j <= i, _mlr_levels)
_LINEAR_REFERENCE = attention_reference(lambda options, i, j: j <= i, linear=True)
_LINEAR = functools.partial(linear_attention, is_causal=True, normalize=False, feature_map="identity")
_GLA = _recurrence(_LINEAR, _feature_decays, delta=False)
_DELTA = _recurrence(delta_rule)

CASES: dict[str, FunctionCase] = {
    "full": FunctionCase(_causal(full_attention), _FULL_REFERENCE, growth=2),
    "local": FunctionCase(_local, _LOCAL_REFERENCE, growth=1),
    "mlr": FunctionCase(_mlr, _MLR_REFERENCE, growth=2),
    "mlr_dense": FunctionCase(_mlr_dense, _MLR_REFERENCE, growth=2),
    "diag": FunctionCase(_causal(diag_attention), _DIAG_REFERENCE, growth=1),
    "linear": FunctionCase(_causal(linear_attention), _LINEAR_REFERENCE, growth=1),
    "retnet": _recurrence(_LINEAR, _slopes, tokens=False, delta=False),
    "mamba2": _recurrence(_LINEAR, _constant_decay, delta=False),
    "gla": _GLA,
    "gla_scan": dataclasses.replace(_GLA, function=_scan(delta=False)),
    "deltanet": _DELTA,
    "gated_deltanet": _recurrence(gated_delta_rule, _constant_decay),
    "kda": _recurrence(kimi_delta_rule, _feature_decays),
    "deltanet_scan": dataclasses.replace(_DELTA, function=_scan(delta=True)),
}
#: What --references may name.
REFERENCES = {"jax_nn": FunctionCase(_causal(jax.nn.dot_product_attention), _FULL_REFERENCE, growth=2)}
TORCH = "torch full"


def has_torch(options: SpeedOptions) -> bool:
    return options.torch and importlib.util.find_spec("torch") is not None


def cases(options: SpeedOptions, length: int) -> list[Case]:
    """The named functions at one length, on the same inputs, and PyTorch's full causal attention."""
    rng = np.random.default_rng(length)
    shape = (options.batch, length, options.heads, options.head_dim)

    @functools.cache
    def arrays() -> Arrays:
        # Through the dtype and back, so that the reference starts from the same numbers.
        draws = [jnp.asarray(rng.standard_normal(shape), options.dtype).astype(jnp.float32) for _ in range(4)]
        query, key, value, d_out = map(np.asarray, draws)
        return query, key, value, d_out

    def make(candidate: Callable[[], Candidate], reference: Callable) -> Candidate:
        tail = max(0, length - 64)
        rows = np.union1d(np.random.default_rng(length).integers(0, length, 32), np.arange(tail, length))
        made = candidate()
        verify(made, reference(options, arrays(), rows, tail), rows, tail, options.dtype)
        return made

    made = []
    for name in (*filter(options.wants, CASES), *options.references):
        case = (CASES | REFERENCES)[name]
        candidate = functools.partial(jax_candidate, case.function, arrays, options)
        made.append(Case(name, case.growth, functools.partial(make, candidate, case.reference)))
    if has_torch(options):
        made.append(Case(TORCH, 2, lambda: make(lambda: torch_candidate(arrays(), options), _FULL_REFERENCE)))
    return made


def jax_candidate(function: Callable, arrays: Callable[[], Arrays], options: SpeedOptions) -> Candidate:
    """Compiles a function of the options and arrays, forward and with its backward pass."""
    query, key, value, d_out = (jnp.asarray(x, options.dtype) for x in arrays())
    attend = functools.partial(function, options)

    return Candidate(
        {
            "forward": compile_program(attend, query, key, value),
            "forward_backward": compile_program(both_passes(attend), d_out, query, key, value),
        }
    )


def torch_device() -> str:
    """The device that PyTorch uses: a GPU if JAX uses one and PyTorch can, else the CPU."""
    import torch

    return "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"


def torch_candidate(arrays: Arrays, options: SpeedOptions) -> Candidate:
    """PyTorch's full causal attention, on its own threads, or on the GPU if JAX uses one."""
    import torch

    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)

    def load(x: np.ndarray) -> Any:
        x = np.ascontiguousarray(x.transpose(0, 2, 1, 3))
        return torch.from_numpy(x).to(torch_device(), getattr(torch, options.dtype))

    *given, d_out = map(load, arrays)
    learned = [x.clone().requires_grad_() for x in given]

    def forward() -> Any:
        with torch.no_grad():
            return attend(*given).transpose(1, 2)

    def both() -> Any:
        out = attend(*learned)
        return [x.transpose(1, 2) for x in (out, *torch.autograd.grad(out, learned, d_out))]

    made = {"forward": forward, "forward_backward": both}
    return Candidate({name: Program(start, None, wait=wait_for_torch) for name, start in made.items()})


def wait_for_torch(result: Any) -> Any:
    """Waits for PyTorch's GPU, whose calls return before they are computed."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return result


def to_numpy(x: Any) -> np.ndarray:
    """A result (B, n, N, H) of either library in float32."""
    if isinstance(x, jax.Array):
        return np.asarray(x.astype(jnp.float32))
    return x.detach().float().cpu().numpy()


def verify(
    candidate: Candidate, expected: tuple[np.ndarray, ...], rows: np.ndarray, tail: int, dtype: str
) -> None:
    """NoNumber unless output and gradients equal the reference; both programs run, and so are warm."""
    tolerance = {"float32": 1e-4, "bfloat16": 2e-2}[dtype]
    alone = to_numpy(candidate.programs["forward"].run())[:, rows]
    out, d_query, d_key, d_value = (to_numpy(x) for x in candidate.programs["forward_backward"].run())
    results = {
        "forward": (alone, expected[0]),
        "output": (out[:, rows], expected[0]),
        "query's gradient": (d_query[:, rows], expected[1]),
        "key's gradient": (d_key[:, tail:], expected[2]),
        "value's gradient": (d_value[:, tail:], expected[3]),
    }
    for what, (got, right) in results.items():
        # The gradient of a single token's softmax is 0, up to rounding.
        error = float(np.linalg.norm(got - right)) / max(float(np.linalg.norm(right)), 1e-2)
        if not error <= tolerance:
            raise NoNumber(
                f"WRONG RESULT: {what} is off by {error:.1e} of its norm, at most {tolerance:.0e} allowed"
            )
