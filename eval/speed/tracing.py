"""What a call costs before it runs: python -m eval.speed --tracing.

For each public function, forward and with the gradient: seconds of processor time to trace and to lower it, calls of
functions of this library while it is traced, and operations in the traced program. `jax.nn.dot_product_attention` comes
first, in the same run. The last row is one decoding step of a decoder with two local layers, traced and lowered whole.
JAX's caches are cleared before each measurement, and the fastest round counts.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import brl_jax as bj
from brl_jax.fields import Count, Length
from brl_jax.layers import LocalConfig
from brl_jax.models import DecoderConfig, DecoderLM
from eval.harness.options import command
from eval.harness.table import Table
from eval.speed.options import HeadOptions
from train.engine.flops import inner_programs

#: What the ratios are to.
BASE = "jax.nn.dot_product_attention"
_PACKAGES = ("brl_jax", "pallas_kernels")


@dataclasses.dataclass(frozen=True)
class TracingOptions(HeadOptions):
    """The shapes of the calls. Tracing does not read them, but long sequences take other forms than short ones."""

    length: Length = 1024
    """Tokens."""
    window: Count = 256
    """Keys that a query of a local function sees."""
    repeats: Count = 3
    """Rounds; the fastest counts."""
    functions: tuple[str, ...] = ()
    """Rows to measure besides the first; all if empty."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What one program costs; `calls` counts functions of this library, `operations` those of JAX in the program."""

    name: str
    gradient: bool
    trace: float
    lower: float
    calls: int
    operations: int


def rows(options: TracingOptions) -> Iterator[Row]:
    """The measurements, one after the other."""
    for name, (function, arrays) in _programs(options).items():
        if options.functions and name not in (BASE, *options.functions):
            continue
        yield _measure(name, False, function, arrays, options.repeats)
        if name != "decoding step":
            yield _measure(name, True, _gradient(function, len(arrays)), arrays, options.repeats)


@command(
    TracingOptions(),
    "eval.speed --tracing",
    "What calls cost before they run: seconds to trace and to lower, calls and operations.",
)
def run(options: TracingOptions) -> None:
    table = Table("", "trace, s", "of jax.nn", "lower, s", "of jax.nn, both", "calls", "operations")
    bases: dict[bool, Row] = {}
    for row in rows(options):
        base = bases.setdefault(row.gradient, row)
        table.add(
            row.name + (", gradient" if row.gradient else ""),
            f"{row.trace:.3f}",
            f"{row.trace / base.trace:.1f}",
            f"{row.lower:.3f}",
            f"{(row.trace + row.lower) / (base.trace + base.lower):.1f}",
            row.calls,
            row.operations,
        )
    table.show()


def library_calls(function: Callable[[], Any]) -> int:
    """Calls of Python functions of this library while a function runs."""
    roots = tuple(f"/{package}/" for package in _PACKAGES)
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        if event == "call" and any(root in frame.f_code.co_filename for root in roots):
            count += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def _measure(name: str, gradient: bool, function: Callable[..., Any], arrays: Any, repeats: int) -> Row:
    def trace() -> Any:
        jax.clear_caches()
        return jax.jit(lambda *arrays: function(*arrays)).trace(*arrays)

    times = []
    for _ in range(repeats):
        start = time.process_time()
        traced = trace()
        middle = time.process_time()
        traced.lower()
        times.append((middle - start, time.process_time() - middle))
    to_trace, to_lower = (min(seconds) for seconds in zip(*times))
    return Row(name, gradient, to_trace, to_lower, library_calls(trace), _operations(traced.jaxpr.jaxpr))


def _operations(jaxpr: Any) -> int:
    """Operations of a program, with those inside other operations."""
    return sum(1 + sum(map(_operations, inner_programs(equation.params))) for equation in jaxpr.eqns)


def _gradient(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    def total(*arrays: Any) -> Any:
        return sum(jnp.sum(x) for x in jax.tree.leaves(function(*arrays)))

    return jax.grad(total, tuple(range(count)))


def _programs(o: TracingOptions) -> dict[str, tuple[Callable[..., Any], tuple]]:
    """name -> (function, arguments)."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *shape), jnp.float32)

    tokens, rate = array(o.length, o.heads, o.head_dim), array(o.length, o.heads)
    few = array(16, o.heads, o.head_dim)
    qkv, history = (tokens,) * 3, (few, tokens, tokens, tokens)
    blocks = array(o.length // o.window, 16, o.heads, o.head_dim)
    local = functools.partial(bj.local_attention, local_window_size=(o.window - 1, 0), is_causal=True)
    columns = jnp.zeros((o.length, 64)) + 1 / o.length
    sizes, sorted_blocks = bj.BlockSizes(), -(-o.length // 64)
    ranks = (o.head_dim // 2, o.head_dim // 4, o.head_dim // 4)

    def native_sparse(q: Any, k: Any, v: Any) -> Any:
        short_k, short_v = (bj.compression_blocks(x, sizes).mean(2) for x in (k, v))
        return bj.native_sparse_attention(q, k, v, short_k, short_v, q[..., :3], sizes=sizes, window=o.window)

    def call(function: Callable[..., Any], arrays: tuple[Any, ...] = qkv, **options: Any) -> Any:
        return functools.partial(function, **options), arrays

    def causal(function: Callable[..., Any], arrays: tuple[Any, ...] = qkv, **options: Any) -> Any:
        return call(function, arrays, is_causal=True, **options)

    order = array(sorted_blocks, o.heads, sorted_blocks)
    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        BASE: causal(jax.nn.dot_product_attention),
        "local_attention": (local, qkv),
        "local_attention, Strided": causal(bj.local_attention, pattern=bj.Strided(32)),
        "local_attention, ALiBi": call(lambda *qkv: local(*qkv, bias=bj.ALiBi(bj.alibi_slopes(o.heads)))),
        "full_attention": causal(bj.full_attention),
        "compress": call(bj.compress, history, gamma=0.1),
        "compress_blocks": call(
            bj.compress_blocks,
            (blocks, *history[1:]),
            gamma=0.1,
            block_size=o.window,
            history_size=o.window // 4,
        ),
        "propagate": call(bj.propagate, (tokens, few, few), strength=0.5),
        "linear_attention": causal(bj.linear_attention),
        "norm_attention": causal(bj.norm_attention),
        "cosformer_attention": causal(bj.cosformer_attention, max_length=o.length),
        "delta_rule": call(lambda q, k, v, b: bj.delta_rule(q, k, v, beta=b), (*qkv, rate)),
        "gated_delta_rule": call(
            lambda q, k, v, b, d: bj.gated_delta_rule(q, k, v, beta=b, log_decay=-d), (*qkv, rate, rate)
        ),
        "kimi_delta_rule": call(
            lambda q, k, v, b: bj.kimi_delta_rule(q, k, v, beta=b, log_decay=-k), (*qkv, rate)
        ),
        "gated_delta_rule_2": call(
            lambda q, k, v: bj.gated_delta_rule_2(q, k, v, erase=k, write=v, log_decay=-k)
        ),
        "rwkv7_attention": call(
            lambda q, k, v: bj.rwkv7_attention(q, k, v, removal_key=v, learning_rate=k, log_decay=-k)
        ),
        "gau_attention": causal(bj.gau_attention),
        "mixed_chunk_attention": causal(lambda q, k, v, **o: bj.mixed_chunk_attention(q, k, q, k, v, **o)),
        "bsbr_attention": causal(lambda q, k, v, **o: bj.bsbr_attention(q, k, v, q, k, **o)),
        "flowformer_attention": causal(bj.flowformer_attention),
        "diag_attention": causal(bj.diag_attention),
        "mlr_attention": causal(bj.mlr_attention, ranks=ranks),
        "hopfield_attention": causal(bj.hopfield_attention),
        "linformer_attention": call(
            lambda *qkv: bj.linformer_attention(*qkv, key_projection=columns.T, value_projection=columns.T)
        ),
        "nystromformer_attention": call(bj.nystromformer_attention),
        "kernelized_attention": call(bj.kernelized_attention),
        "native_sparse_attention": call(native_sparse),
        "informer_attention": call(lambda *qkv: bj.informer_attention(*qkv, rng=jax.random.key(0))),
        "reformer_attention": causal(
            lambda q, k, v, **options: bj.reformer_attention(q, v, jnp.ones((2, o.head_dim, 8)), **options)
        ),
        "sinkhorn_attention": causal(bj.sinkhorn_attention, (*qkv, order), block_size=64),
        "performer_attention": causal(
            lambda *qkv, **options: bj.performer_attention(
                *qkv, projection=jnp.ones((o.head_dim, o.head_dim)), **options
            )
        ),
        "long_short_attention": causal(
            lambda q, k, v, **options: bj.long_short_attention(q, k, v, k[..., :8], **options),
            window=o.window,
        ),
        "luna_attention": call(
            lambda q, k, v: bj.luna_attention(q, k, v, jnp.ones((16, o.heads, o.head_dim)))
        ),
        "skyformer_attention": call(
            lambda *qkv: bj.skyformer_attention(*qkv, samples=jnp.linspace(0.0, 0.9, 32))
        ),
        "global_window_attention": causal(
            bj.global_window_attention, ranks=(o.head_dim // 2,) * 2, window=o.window
        ),
        "synthesizer_attention": call(
            lambda v: bj.synthesizer_attention(v, *(jnp.ones((o.length, o.heads, 8)) for _ in range(2))),
            (tokens,),
        ),
    }
    decoder = DecoderLM(
        DecoderConfig(
            vocab_size=256,
            num_layers=2,
            d_model=o.heads * o.head_dim,
            num_heads=o.heads,
            mechanism=LocalConfig(window=o.window),
        )
    )
    token = jnp.zeros((1, 1), jnp.int32)
    variables = nn.unbox(jax.eval_shape(decoder.init, jax.random.key(0), token))
    cache = jax.eval_shape(lambda: decoder.init_cache(1, o.length))
    programs["decoding step"] = (
        lambda variables, token, cache: decoder.apply(variables, token, cache=cache),
        (variables, token, cache),
    )
    return programs
