"""Generation with a cache: python -m eval.speed --generation.

Compares TLinFormer with the plain decoder of the same parameters. For each length N of the text so far:
  first token  from nothing to the first logits: TLinFormer computes the first block's keys and values and then its
               first miss; the plain decoder reads the text in pieces of 2048 tokens;
  miss         the step with which a window fills: the context and the later blocks' history are recomputed;
  hit          a step inside a window (the plain decoder has no other kind);
  cache        its bytes, for N tokens and one window more.
Both caches are preallocated and written in place. Their contents do not affect the time, so they are not computed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from rich.console import Console

from brl_jax.fields import Count, Length, Natural
from brl_jax.layers import FullConfig, TLinFormerConfig
from brl_jax.models import DecoderConfig, DecoderLM
from eval.harness.options import command
from eval.harness.table import Table, straight_line
from eval.speed import report
from eval.speed.measure import Candidate, Case, Program, check_memory, measure, sigterm_interrupts
from eval.speed.options import HeadOptions, MeasureOptions
from eval.speed.plain_decoders import concatenated_step, empty_rows, reread_step
from train.engine.errors import UserError

TLINFORMER, PLAIN, PLAIN_PROMPT = "tlinformer", "plain decoder", "plain decoder, prompt"
CONCATENATED, REREAD = "plain decoder, concatenated", "plain decoder, reread"
Plain = Literal["in_place", "concatenated", "reread"]
# Tokens of the prompt that are read at a time.
_PIECE = 2048


@dataclasses.dataclass(frozen=True)
class NetworkOptions(HeadOptions):
    """A TLinFormer (arXiv:2508.20407, which has --heads 12 --head_dim 36) and the plain decoder of its parameters."""

    window: Count = 256
    """Tokens that share one state of the history (W_og)."""
    context: Count = 256
    """Last tokens of the history that represent it in a block's inner layers (W_oh)."""
    hidden: Natural = 2
    """Layers of a block between its first and its last (H)."""
    layers: Count = 8
    """Layers in all."""
    vocabulary: Count = 50257
    """Size of the vocabulary."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the computation and the cache."""

    def model(self, name: str) -> DecoderLM:
        """The network of a row, with the feed-forward width of TLinFormer (arXiv:2508.20407)."""
        mechanism = TLinFormerConfig(self.window, self.context, self.hidden)
        return DecoderLM(
            DecoderConfig(
                num_layers=self.layers,
                d_model=self.width,
                num_heads=self.heads,
                d_ff=math.ceil(8 * self.width / 3 / 256) * 256,
                ffn="swiglu",
                use_bias=True,
                ffn_bias=False,
                vocab_size=self.vocabulary,
                dtype=self.dtype,
                mechanism=mechanism if name == TLINFORMER else FullConfig(),
            )
        )


@dataclasses.dataclass(frozen=True)
class GenerationOptions(NetworkOptions, MeasureOptions):
    """The networks and the lengths."""

    lengths: tuple[Length, ...] = (1024, 8192, 16384, 32768, 65536, 131072)
    """Tokens of the text so far, multiples of the window."""
    plain: tuple[Plain, ...] = ("in_place",)
    """Measure the plain decoder too: with a cache that its steps write in place, one that each step copies into a
    longer one, or one that keeps queries, keys and values while each step computes the rows of all tokens again; none:
    --plain."""

    def __post_init__(self):
        if not self.lengths or any(n < self.window or n % self.window for n in self.lengths):
            raise ValueError(f"lengths must be multiples of window={self.window}, got {self.lengths}")


@command(
    GenerationOptions(head_dim=32, repeats=3, patience=30.0, limit=300.0),
    "eval.speed --generation",
    "Times generation with a cache: TLinFormer, a plain decoder.",
)
def run(options: GenerationOptions) -> None:
    report.check_outputs(options)
    try:
        params = _parameters(options)
    except ValueError as error:
        raise UserError(str(error)) from error
    rows: list[dict] = []
    console = Console()
    try:
        with sigterm_interrupts():
            for length in options.lengths:
                measure(_cases(options, params, length), length, rows, label="generation", **options.limits)
    finally:
        console.print(_table(rows, options).for_terminal())
        fitted = lines(rows)
        for name, line in fitted.items():
            console.print(
                f"{name}: {line['intercept_ms']:.2f} ms + {line['ms_per_1000_tokens']:.4f} ms for 1000 tokens, "
                f"R^2 {line['r_squared']:.4f}, over n = {line['from']}..{line['to']}",
                highlight=False,
            )
        rows = [{"level": "generation", **row} for row in rows]
        report.publish(rows, options, console, 1, lines=fitted)


def _parameters(options: GenerationOptions) -> Any:
    """One set of parameters: the two networks have the same."""
    init = functools.partial(options.model(TLINFORMER).init, tokens=jnp.zeros((1, 1), jnp.int32))
    return nn.unbox(jax.jit(init)(jax.random.key(0)))


def _cases(options: GenerationOptions, params: Any, length: int) -> list[Case]:
    tlinformer = Case(TLINFORMER, 1, functools.partial(_tlinformer, options, params, length))
    makers: dict[Plain, dict[str, tuple[int, Callable]]] = {
        "in_place": {PLAIN: (1, _plain), PLAIN_PROMPT: (2, _plain_prompt)},
        "concatenated": {CONCATENATED: (1, _concatenated)},
        "reread": {REREAD: (2, _reread)},
    }
    wanted = [case for kind in options.plain for case in makers[kind].items()]
    return [
        tlinformer,
        *(
            Case(name, growth, functools.partial(make, options, params, length))
            for name, (growth, make) in wanted
        ),
    ]


def _cache(options: GenerationOptions, model: DecoderLM, length: int) -> Any:
    """A cache for `length` tokens and a window more; NoNumber if it does not fit into memory."""
    size = length + options.window
    check_memory(_bytes(jax.eval_shape(lambda: model.init_cache(1, size))), 0.8, "for the cache")
    return model.init_cache(1, size)


def _bytes(cache: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


class _CarriedCache:
    """A cache that the programs of a row share and change in place."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.bytes = _bytes(cache)

    def compile(self, function: Callable, params: Any, count: int) -> Any:
        """Compiles function(params, tokens, cache) for this number of tokens; NoNumber if it does not fit."""
        lowered = jax.jit(function, donate_argnums=2).lower(params, _token(count), self.cache)
        compiled: Any = lowered.compile()
        check_memory(compiled.memory_analysis().temp_size_in_bytes, 0.8)
        return compiled

    def run(self, compiled: Any, params: Any, count: int = 1) -> Any:
        """Runs a compiled function on the cache; returns its result."""
        out, self.cache = compiled(params, _token(count), self.cache)
        return out

    def place(self, **places: int) -> None:
        """Sets the cache's counters of these names."""
        self.cache = _at(self.cache, **places)

    def program(self, compiled: Any, params: Any, **places: int) -> Program:
        """One step with the cache's counters set to `places`."""

        def start() -> Any:
            self.place(**places)
            return self.run(compiled, params)

        return Program(start, compiled.memory_analysis().temp_size_in_bytes)


def _at(cache: Any, **places: int) -> Any:
    """A cache with the arrays of these names filled with these numbers."""

    def place(path, leaf):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return jnp.full(leaf.shape, places[name], leaf.dtype) if name in places else leaf

    return jax.tree_util.tree_map_with_path(place, cache)


def _token(count: int) -> jax.Array:
    return jnp.zeros((1, count), jnp.int32)


def _step(model: DecoderLM) -> Callable:
    return lambda params, tokens, cache: model.apply(params, tokens, cache=cache)


def _tlinformer(options: GenerationOptions, params: Any, length: int) -> Candidate:
    model = options.model(TLINFORMER)
    carried = _CarriedCache(_cache(options, model, length))
    step = carried.compile(_step(model), params, 1)
    piece = math.gcd(length, max(_PIECE // options.window, 1) * options.window)

    def read(params: Any, tokens: Any, cache: Any) -> Any:
        cache = model.apply(params, tokens, cache, method="absorb")
        return cache.length, cache

    absorb = carried.compile(read, params, piece)
    miss = carried.program(step, params, length=length, window_index=0)

    def first_token() -> Any:
        carried.place(length=0, window_index=0)
        for _ in range(length // piece):
            carried.run(absorb, params, piece)
        return miss.start()

    middle = {"length": length + options.window // 2, "window_index": length // options.window}
    programs = {
        "first_token": Program(first_token, None),
        "miss": miss,
        "hit": carried.program(step, params, **middle),
    }
    return Candidate(programs, {"cache_bytes": carried.bytes})


def _plain(options: GenerationOptions, params: Any, length: int) -> Candidate:
    model = options.model(PLAIN)
    carried = _CarriedCache(_cache(options, model, length))
    step = carried.compile(_step(model), params, 1)
    programs = {"hit": carried.program(step, params, length=length)}
    return Candidate(programs, {"cache_bytes": carried.bytes})


def _plain_prompt(options: GenerationOptions, params: Any, length: int) -> Candidate:
    model = options.model(PLAIN)
    carried = _CarriedCache(_cache(options, model, length))
    piece = math.gcd(length, _PIECE)

    def read(params: Any, tokens: Any, cache: Any) -> Any:
        hidden, cache = model.apply(params, tokens, cache=cache, method="hidden")
        return model.apply(params, hidden[:, -1:], method="logits"), cache

    prefill = carried.compile(read, params, piece)

    def first_token() -> Any:
        carried.place(length=0)
        for _ in range(length // piece):
            out = carried.run(prefill, params, piece)
        return out

    return Candidate({"first_token": Program(first_token, prefill.memory_analysis().temp_size_in_bytes)})


def _concatenated(options: GenerationOptions, params: Any, length: int) -> Candidate:
    model = options.model(PLAIN)
    cache = _at(model.init_cache(1, length), length=length)
    return _kept_step(functools.partial(concatenated_step, model, length), params, _token(1), cache)


def _reread(options: GenerationOptions, params: Any, length: int) -> Candidate:
    model = options.model(PLAIN)
    return _kept_step(
        functools.partial(reread_step, model), params, _token(length + 1), empty_rows(model, length)
    )


def _kept_step(function: Callable, params: Any, tokens: Any, cache: Any) -> Candidate:
    """A step that leaves its cache as it is and returns a longer one."""
    compiled: Any = jax.jit(function).lower(params, tokens, cache).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    check_memory(temporary, 0.8)
    step = Program(lambda: compiled(params, tokens, cache), temporary)
    return Candidate({"hit": step}, {"cache_bytes": _bytes(cache)})


def lines(rows: Sequence[dict], start: int = 8192) -> dict[str, dict[str, float]]:
    """The lines t = a + b N through the times of misses and of hits from N = `start` on, if at least three are
    known."""
    found = {}
    for what in ("miss", "hit"):
        points = [
            (row["length"], 1e3 * row[f"{what}_s"])
            for row in rows
            if row["name"] == TLINFORMER and row.get(f"{what}_s") and row["length"] >= start
        ]
        if len(points) < 3:
            continue
        lengths, times = zip(*points)
        line = straight_line(lengths, times)
        found[what] = {
            "intercept_ms": line["at_0"],
            "ms_per_1000_tokens": 1e3 * line["slope"],
            "r_squared": line["r_squared"],
            "from": min(lengths),
            "to": max(lengths),
        }
    return found


def _table(rows: Sequence[dict], options: GenerationOptions) -> Table:
    others = {CONCATENATED: "concatenated", REREAD: "reread"}
    others = {name: title for name, title in others.items() if any(row["name"] == name for row in rows)}
    table = Table(
        "n", "tlin first", "plain first", "miss", "hit", "plain step", *others.values(), "tlin MiB", "plain MiB",
        "cache",
        title=f"generation, {options.layers} layers of width {options.width}, {options.dtype}, "
        f"on {jax.devices()[0].device_kind}: seconds for the first token, milliseconds a step",
    )  # fmt: skip
    for length in options.lengths:
        own = {row["name"]: row for row in rows if row["length"] == length}
        tlin, plain, prompt = (own.get(name, {}) for name in (TLINFORMER, PLAIN, PLAIN_PROMPT))
        caches = [row.get("cache_bytes") for row in (tlin, plain)]
        table.add(
            length,
            *(report.cell(row, "first_token_s", 1.0) for row in (tlin, prompt)),
            *(
                report.cell(row, name, 1e-3)
                for row, name in ((tlin, "miss_s"), (tlin, "hit_s"), (plain, "hit_s"))
            ),
            *(report.cell(own.get(name, {}), "hit_s", 1e-3) for name in others),
            *(report.cell(row, "cache_bytes", 2.0**20) for row in (tlin, plain)),
            f"{caches[0] / caches[1]:.3f}" if caches[0] and caches[1] else None,
        )
    return table
