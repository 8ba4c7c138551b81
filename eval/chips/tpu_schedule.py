"""Instruction schedules of the TPU kernels, without a TPU: python -m eval.tpu_schedule.

The package libtpu compiles for real TPU chips on a CPU host and writes the final instruction bundles of every kernel
to files (a bundle takes about one cycle). The cost of a kernel is the number of bundles in one grid step times the
number of grid steps; of XLA's instructions, the bundles in one pass of the outer loop times the passes
(`iteration_bounds`), counting deeper loops once. Only issue slots are counted, so the bytes that the block specs fetch
and write are counted as well, except in kernels whose block specs read scalars.

Each row also has lower bounds in cycles: `least`, what the matrix units need for the products of visible pairs; `in
tiles`, what they need for the products that the kernel performs; and `memory`. A schedule may promise less than `in
tiles`, because the compiler may issue products faster than the units take them: then `in tiles` is what counts. For
splash attention, only the pairs of blocks in which something is visible count, although its fused backward pass steps
over the other pairs as well. docs/measured.md has the tables.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from brl_jax.attention.core.biases import ALiBi, T5Bias
from brl_jax.attention.core.query_blocks import QUERY_BLOCK
from brl_jax.attention.core.tpu_blocks import BLOCK, all_blocks
from brl_jax.attention.dense import full_tpu
from brl_jax.attention.dense.full_xla import FullArrays, attend_in_blocks
from brl_jax.attention.local import tpu as local_tpu
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.patterns import CallArrays, PatternCall, SlidingWindow
from brl_jax.attention.recurrent.delta import gated_delta_rule, kimi_delta_rule
from brl_jax.attention.recurrent.kernels import Walked, walk_on_tpu
from brl_jax.attention.recurrent.linear import linear_attention
from brl_jax.attention.sorting.native_sparse import DEFAULT_SIZES
from brl_jax.attention.sorting.selected import selected_attention
from brl_jax.fields import Checked, Count, Length, Width
from eval.chips.tpu_bounds import matrix_cycles, memory_cycles, tiled_products, visible_products
from eval.chips.tpu_chips import SMALLEST_TOPOLOGIES, described_devices, prepare_compiler
from eval.harness.options import check_names, command
from eval.harness.passes import both_passes
from eval.harness.table import Table
from pallas_kernels import tpu
from train.engine.errors import RunError
from train.engine.flops import inner_programs

#: Tokens for which splash attention is compiled; its steps are counted for the whole sequence.
_SPLASH_LENGTH = 4096
_PASSES = ("forward", "forward + backward")


@dataclasses.dataclass(frozen=True)
class ScheduleOptions(Checked):
    """What to compile: causal windows in bfloat16, batch size 1."""

    chips: tuple[str, ...] = ("v5e", "v6e")
    """Chips to compile for: any of v4, v5e, v5p, v6e, 7x."""
    windows: tuple[Count, ...] = (256, 512)
    """Keys that a query sees, its own included; empty: no sliding-window attention."""
    compressed: tuple[Count, ...] = (128,)
    """Numbers of compressed tokens for compress and propagate; empty: neither."""
    full: bool = False
    """Compile full causal attention."""
    biases: tuple[str, ...] = ()
    """Compile windows and, with --full, full attention with these biases too: alibi, t5."""
    chosen: bool = False
    """Compile the attention to chosen blocks of native sparse attention, a key head for every four heads."""
    recurrences: tuple[str, ...] = ("linear", "gated delta", "gla", "kda")
    """Recurrences to compile."""
    length: Length = 16384
    """Sequence length in tokens."""
    heads: Width = 8
    """Heads of query, key and value."""
    head_dim: Width = 128
    """Head dimension."""
    any_chip: bool = False
    """Use the block sizes that fit every chip, instead of the chip's own."""
    splash_blocks: tuple[Count, ...] = (128, 256, 512, 1024)
    """Splash attention is compiled at every pair of these block sizes; empty: no splash attention."""

    def __post_init__(self) -> None:
        check_names(self, chips=SMALLEST_TOPOLOGIES, biases=_BIASES, recurrences=_RECURRENCES)


@dataclasses.dataclass(frozen=True)
class ScheduleCase:
    """One program to compile: `build(options, chip, shape)` returns (function, shapes of its arguments)."""

    kind: str
    label: str
    build: Callable[..., tuple[Callable, tuple]]
    splash_blocks: tuple[int, int] | None = None
    window: int | None = None
    products: Callable[[str], tuple[int, int | None]] | None = None
    """Products of the matrix units that the result needs, and those that the kernel performs, for a chip."""
    trips: int | None = None
    """How often its own loops run, if the instructions around kernels count too."""


def _flat(function: Callable, *shapes: tuple[int, ...]) -> Callable:
    """The function of arrays of these shapes, as one of arrays with heads side by side, as projections give them."""

    def call(*arrays):
        given = [x.reshape(to) for x, to in zip(arrays, shapes)]
        return function(*given, *arrays[len(shapes) :]).reshape(arrays[0].shape)

    return call


def _passes(function: Callable, arguments: tuple, backward: bool) -> tuple[Callable, tuple]:
    """The function or, with its gradients by floating-point arrays, the function of a cotangent like its first argument
    and of its arguments."""
    if not backward:
        return function, arguments
    learned = [i for i, x in enumerate(arguments) if jnp.issubdtype(x.dtype, jnp.floating)]
    return both_passes(function, learned), (arguments[0], *arguments)


def _heads(options: ScheduleOptions) -> tuple[int, ...]:
    return (1, options.length, options.heads, options.head_dim)


def _window(options: ScheduleOptions, chip: str | None, shape, *, window: int, backward: bool):
    full = _heads(options)
    attend = functools.partial(tpu.window_attention, left=window - 1, right=0, chip=chip)
    if backward:
        return _passes(_flat(attend, full, full, full), (shape,) * 3, True)

    def forward(*arrays):
        out, log_sum = attend(*(x.reshape(full) for x in arrays), return_log_sum_exp=True)
        return out.reshape(shape.shape), log_sum

    return forward, (shape,) * 3


def _full(options: ScheduleOptions, chip: str | None, shape, *, backward: bool):
    # A causal call's kernel has two bodies. All pairs off the diagonal take the one without a mask, which is the same
    # as in a call that is not causal.
    def attend(query, key, value) -> Any:
        return full_tpu.attend(
            FullArrays(query, key, value), scale=options.head_dim**-0.5, is_causal=False, offset=0, cap=None,
            return_residual=False, interpret=False,
        )[0]  # fmt: skip

    return _passes(_flat(attend, *[_heads(options)] * 3), (shape,) * 3, backward)


#: Shapes of the numbers of a bias, given the heads, and the bias.
_BIASES: dict[str, tuple[Callable, Callable]] = {
    "alibi": (lambda heads: (heads,), ALiBi),
    "t5": (lambda heads: (32, heads), T5Bias),
}


def _biased(
    options: ScheduleOptions, chip: str | None, shape, *, window: int, bias: str, backward: bool, pallas: bool
):
    """A window or, if it is as long as the rows, full attention."""
    numbers_shape, make = _BIASES[bias]
    mesh = jax.sharding.Mesh(np.asarray(list(shape.sharding.device_set)), ("device",)).abstract_mesh
    window_call = PatternCall(
        pattern=SlidingWindow(window - 1, 0),
        is_causal=True,
        scale=options.head_dim**-0.5,
        num_queries=options.length,
        num_keys=options.length,
    )
    static: dict[str, Any] = {"scale": options.head_dim**-0.5, "cap": None, "return_residual": False}

    def attend(query, key, value, numbers) -> Any:
        given = make(numbers)
        if window < options.length:
            arrays = CallArrays(query, key, value, given)
            if pallas:
                # `local_attention` knows the chip by the mesh.
                with contextlib.nullcontext() if chip is None else jax.sharding.use_abstract_mesh(mesh):
                    return local_tpu.attend(window_call, arrays, interpret=False)[0]
            return local_attention(
                query,
                key,
                value,
                bias=given,
                local_window_size=(window - 1, 0),
                is_causal=True,
                implementation="xla",
            )
        x = FullArrays(query, key, value, given)
        if pallas:
            # Without the causal flag the kernel has one body: see `_full`.
            return full_tpu.attend(x, is_causal=False, offset=0, interpret=False, **static)[0]
        return attend_in_blocks(x, is_causal=True, **static)

    numbers = jax.ShapeDtypeStruct(numbers_shape(options.heads), jnp.float32, sharding=shape.sharding)
    return _passes(_flat(attend, *[_heads(options)] * 3), (*(shape,) * 3, numbers), backward)


def _splash(
    options: ScheduleOptions, chip: str | None, shape, *, window: int, blocks: tuple[int, int], mode: str
):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    rows, columns = blocks
    # A step is the same at any length, but the mask that makes this kernel grows with the square of the length.
    length = min(options.length, _SPLASH_LENGTH)
    size = (length, length)
    fused = mode == "fused"
    sizes = kernel.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_kv_dkv_compute=columns,
        block_q_dq=None if fused else rows,
        block_kv_dq=None if fused else columns,
        use_fused_bwd_kernel=fused,
    )
    attend = kernel.make_splash_mha(
        masks.MultiHeadMask(
            [masks.LocalMask(size, (window - 1, 0), 0) if window < length else masks.CausalMask(size)]
        ),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=mode == "forward",
    )
    # One head is enough: its steps count for each head, and its mask is built once.
    shape = jax.ShapeDtypeStruct((1, length, options.head_dim), shape.dtype, sharding=shape.sharding)
    if mode == "forward":
        return attend, (shape,) * 3
    return lambda query, key, value, grad: jax.vjp(attend, query, key, value)[1](grad), (shape,) * 4


def _compressed(
    options: ScheduleOptions, chip: str | None, shape, *, kind: str, tokens: int, backward: bool, pallas: bool
):
    long, short = _heads(options), (1, tokens, options.heads, options.head_dim)
    scale = options.head_dim**-0.5
    factor = jnp.ones((options.heads,), jnp.float32)

    def attend(query, key, value):
        scores = jnp.einsum("bmnh,bsnh->bnms", query, key, preferred_element_type=jnp.float32) * scale
        weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
        return jnp.einsum("bnms,bsnh->bmnh", weights, value)

    def contrast(query, key, contrast_key, value):
        return attend(query, key, value) - attend(query, contrast_key, value)

    call: Callable
    if kind == "compress":
        call = functools.partial(tpu.compress, gamma=factor, scale=scale, chip=chip) if pallas else contrast
        shapes: tuple[tuple[int, ...], ...] = (short, long, long, long)
    else:
        call = functools.partial(tpu.propagate, strength=factor, chip=chip) if pallas else attend
        shapes = (long, short, short)

    flat = [jax.ShapeDtypeStruct((*s[:2], s[2] * s[3]), shape.dtype, sharding=shape.sharding) for s in shapes]
    return _passes(_flat(call, *shapes), tuple(flat), backward)


def _chosen(options: ScheduleOptions, chip: str | None, shape, *, backward: bool, pallas: bool) -> Any:
    sizes, heads = DEFAULT_SIZES, options.heads
    kv_heads = -(-heads // 4)
    full, starts = _heads(options), (1, options.length, kv_heads, sizes.blocks)
    short = (*full[:2], kv_heads, options.head_dim)
    scale = options.head_dim**-0.5

    def attend(query, key, value, starts) -> Any:
        if not pallas:
            out = selected_attention(
                query,
                key,
                value,
                starts,
                size=sizes.selected,
                scale=scale,
                aligned=True,
                implementation="xla",
            )
            return out.astype(query.dtype)
        # Without the causal flag the kernel has one body: see `_full`.
        return tpu.block_attention(
            query, key, value, scale=scale, chosen_starts=starts, chosen_size=sizes.selected, chosen_aligned=True,
            chip=chip, **all_blocks(options.length, options.length, False, 0),
        )  # fmt: skip

    narrow = jax.ShapeDtypeStruct(short, shape.dtype, sharding=shape.sharding)
    arguments = (shape, narrow, narrow, jax.ShapeDtypeStruct(starts, jnp.int32, sharding=shape.sharding))
    return _passes(_flat(attend, full), arguments, backward)


_RECURRENCES: dict[str, Callable] = {
    "linear": linear_attention,
    "gated delta": gated_delta_rule,
    "gla": linear_attention,
    "kda": kimi_delta_rule,
}
#: Tokens of a chunk of the walk through XLA: the default of the public functions.
_CHUNK = 64


def _recurrence(
    options: ScheduleOptions, chip: str | None, shape, *, name: str, backward: bool, pallas: bool
):
    full = _heads(options)
    by_feature = name in ("gla", "kda")
    numbers = jax.ShapeDtypeStruct(full if by_feature else full[:3], jnp.float32, sharding=shape.sharding)
    state = jnp.zeros((1, options.heads, options.head_dim, options.head_dim))
    more: dict[str, Any] = {"normalize_keys": False}
    if _RECURRENCES[name] is linear_attention:
        more = {"is_causal": True, "normalize": False, "feature_map": "identity"}

    def attend(query, key, value, numbers):
        gates = {}
        if name in ("gated delta", "kda"):
            gates["beta"] = numbers[..., 0] if by_feature else numbers
        if name != "linear":
            gates["log_decay"] = -numbers
        if pallas:
            walked = Walked(query, key, value, state, **gates)
            return walk_on_tpu(walked, interpret=False).total.astype(query.dtype)
        return _RECURRENCES[name](query, key, value, implementation="xla", chunk_size=_CHUNK, **gates, **more)

    return _passes(_flat(attend, full, full, full), (shape, shape, shape, numbers), backward)


def _products(
    options: ScheduleOptions, window: int, chip: str, *, tiled: bool, backward: bool
) -> tuple[int, int | None]:
    shape = (options.length, window, options.heads, options.head_dim)
    least = visible_products(*shape, backward=backward)
    return least, tiled_products(chip, *shape, options.any_chip, backward=backward) if tiled else None


def cases(options: ScheduleOptions) -> Iterator[ScheduleCase]:
    """All requested programs; those for forward + backward contain both kernels."""
    windows: list[tuple[int, str, Callable]]
    windows = [(size, f"window {size}", functools.partial(_window, window=size)) for size in options.windows]
    if options.full:
        windows.append((options.length, "full causal", _full))
    for (window, name, ours), backward in itertools.product(windows, (False, True)):
        kind = f"{name} {_PASSES[backward]}"
        products = functools.partial(_products, options, window, tiled=ours is not _full, backward=backward)
        yield ScheduleCase(kind, "ours", functools.partial(ours, backward=backward), products=products)
        sizes = [size for size in options.splash_blocks if options.length % size == 0]
        for blocks, mode in itertools.product(
            itertools.product(sizes, sizes), ("separate", "fused") if backward else ("forward",)
        ):
            build = functools.partial(_splash, window=window, blocks=blocks, mode=mode)
            yield ScheduleCase(kind, f"splash {blocks[0]} x {blocks[1]} {mode}", build, blocks, window)
    # (what, build, the other form, how often our form's own loops run, and the other's)
    pairs: list[tuple[str, Callable, str, int | None, int | None]] = []
    for (window, name, _), bias in itertools.product(windows, options.biases):
        build = functools.partial(_biased, window=window, bias=bias)
        pairs.append((f"{name}, {bias},", build, "XLA", None, -(-options.length // QUERY_BLOCK)))
    for tokens, name in itertools.product(options.compressed, ("compress", "propagate")):
        build = functools.partial(_compressed, kind=name, tokens=tokens)
        pairs.append((f"{name} m={tokens}", build, "jax.numpy", None, None))
    if options.chosen:
        pairs.append(("chosen blocks", _chosen, "XLA", None, -(-options.length // 64)))
    chunks = -(-options.length // _CHUNK)
    for name in options.recurrences:
        pairs.append((name, functools.partial(_recurrence, name=name), "XLA", chunks, chunks))
    for (name, build, other, ours_trips, trips), backward in itertools.product(pairs, (False, True)):
        kind, build = f"{name} {_PASSES[backward]}", functools.partial(build, backward=backward)
        yield ScheduleCase(kind, "ours", functools.partial(build, pallas=True), trips=ours_trips)
        yield ScheduleCase(kind, other, functools.partial(build, pallas=False), trips=trips)


def pallas_calls(jaxpr) -> Iterator[Any]:
    """The pallas_call equations of a jaxpr, including those inside other equations."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for inner in inner_programs(equation.params):
            yield from pallas_calls(inner)


def bytes_moved(call) -> tuple[int, int]:
    """Bytes that the block specs of a kernel read from HBM and write to it: a block moves when its index changes."""
    mapping = call.params["grid_mapping"]
    points = np.stack(np.meshgrid(*[np.arange(size) for size in mapping.grid], indexing="ij"), -1)
    points = points.reshape(-1, len(mapping.grid)).astype(np.int32)
    moved = []
    for spec, operand in zip(mapping.block_mappings, (*call.invars, *call.outvars), strict=True):
        index = jax.vmap(jax.extend.core.jaxpr_as_fun(spec.index_map_jaxpr))
        indices = np.stack([np.broadcast_to(x, len(points)) for x in index(*points.T)], -1)
        changes = 1 + int((indices[1:] != indices[:-1]).any(-1).sum())
        block = math.prod(int(getattr(size, "block_size", size) or 1) for size in spec.block_shape)
        moved.append(changes * block * operand.aval.dtype.itemsize)
    return sum(moved[: mapping.num_inputs]), sum(moved[mapping.num_inputs :])


def bundles(folder: Path, seen: set[str]) -> collections.Counter[str]:
    """Bundles in one grid step of each kernel whose schedule file is not in `seen`; adds the file to `seen`.

    An instruction without a loop is one step.
    """
    found: collections.Counter[str] = collections.Counter()
    for path in sorted(folder.glob("*-final_bundles.txt")):
        name = re.fullmatch(r"\d+-(.+?)-\d+-final_bundles\.txt", path.name)
        if path.name in seen or name is None or "schedule-analysis" in path.name:
            continue
        seen.add(path.name)
        depths = re.findall(
            r"^\s*(?:0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2}:?)?\s*:\s*(>*)\s*\{", path.read_text(), re.M
        )
        found[name[1]] += sum(map(bool, depths)) or len(depths)
    return found


def loops(text: str, found: collections.Counter[str], trips: int | None = None) -> list[tuple[str, int, int]]:
    """(name, bundles, passes) of the loops of a compiled program's instructions that are not Pallas kernels.

    Equal instructions share one schedule, under the name of the first. An instruction without a schedule has no loop.

    Args:
      trips: how often each of the program's own loops runs; None for a program without any.
    """
    entry = text[text.index("\nENTRY ") :]
    bodies = re.findall(r" while\(.*?body=%([\w.-]+)", entry)
    inside = [text[text.index(f"\n%{name} (") + 1 :].split("\n}", 1)[0] for name in bodies]
    if any(" while(" in body for body in inside) or (bodies and trips is None):
        raise RunError("a program that loops over its instructions has no static cost")
    listed: list[tuple[str, tuple, int]] = []
    schedules: dict[tuple, int] = {}
    for computation, times in [(entry, 1), *((body, trips or 1) for body in inside)]:
        for name, what, config in re.findall(r"%([\w.-]+) = (.+?)\(%.*?(\{.*)", computation):
            bounds = re.search(r'"iteration_bounds":\[([^\]]*)\]', config)
            if bounds is None:
                continue
            cycles = re.findall(r'"estimated_cycles":"(\d+)"', config)
            passes = math.prod(int(size) for size in re.findall(r"\d+", bounds[1]))
            listed.append((name, (what, passes, *cycles), times))
            if name in found:
                schedules.setdefault(listed[-1][1], found[name])
    return [
        (name, found[name] if name in found else schedules[like], like[1] * times)
        for name, like, times in listed
        if name in found or like in schedules
    ]


def visible_blocks(length: int, window: int, rows: int, columns: int) -> int:
    """The number of pairs of blocks in which some query sees some key under a causal window."""
    first = np.arange(0, length, rows)
    low = np.maximum(first - window + 1, 0) // columns
    return int(((first + rows - 1) // columns - low + 1).sum())


def measure(
    case: ScheduleCase, options: ScheduleOptions, chip: str, device, folder: Path, seen: set[str]
) -> dict[str, Any]:
    """Compiles one case and returns its cost in bundles and the bytes that its kernels fetch."""
    shape = jax.ShapeDtypeStruct(
        (1, options.length, options.heads * options.head_dim),
        jnp.bfloat16,
        sharding=jax.sharding.SingleDeviceSharding(device),
    )
    function, arguments = case.build(options, None if options.any_chip else chip, shape)
    traced = jax.jit(function).trace(*arguments)
    calls = list(pallas_calls(traced.jaxpr.jaxpr))
    text = traced.lower().compile().as_text()
    found = bundles(folder, seen)
    fetched, written, kernels = 0, 0, [] if calls and case.trips is None else loops(text, found, case.trips)
    for call in calls:
        name = call.params["name"] if "name" in call.params else call.params["name_and_src_info"].name
        steps = math.prod(call.params["grid_mapping"].grid)
        if case.splash_blocks is not None:
            assert case.window is not None
            steps = options.heads * visible_blocks(options.length, case.window, *case.splash_blocks)
        elif case.kind.startswith(("full causal", "chosen")):
            batch, tiles, pairs, *group = call.params["grid_mapping"].grid
            rows = options.length**2 // (BLOCK * pairs)
            causal = all_blocks(options.length, options.length, True, 0, block_q=rows)["key_blocks"]
            steps = math.prod((batch, tiles, sum(map(len, causal)), *group))
        elif not call.params["grid_mapping"].num_index_operands:
            read, wrote = bytes_moved(call)
            fetched, written = fetched + read, written + wrote
        matches = [kernel for kernel in found if re.sub(r"\W", "_", name) in kernel]
        if len(matches) != 1:
            raise RunError(f"{case.label}: no one schedule for kernel {name} among {sorted(found)}")
        kernels.append((name, found[matches[0]], steps))
    least, tiled = (None, None) if case.products is None else case.products(chip)
    return {
        "cost": sum(bundle * steps for _, bundle, steps in kernels),
        "fetched": fetched,
        "least": None if least is None else matrix_cycles(chip, least),
        "tiled": None if tiled is None else matrix_cycles(chip, tiled),
        "memory": memory_cycles(chip, fetched + written),
        "kernels": kernels,
        "detail": ", ".join(f"{bundle} x {steps}" for _, bundle, steps in kernels),
    }


def best_other(rows: list[dict[str, Any]]) -> tuple[int, str] | None:
    """Cost and name of the cheapest alternative to our kernels. Splash attention's kernels are chosen one by one."""
    others = [row for row in rows if row["label"] != "ours" and row["cost"]]
    best: dict[str, tuple[int, str]] = {}
    for row in others:
        if not row["label"].startswith("splash"):
            return row["cost"], f"{row['label']}, {len(row['kernels'])} loops"
        blocks, mode = row["label"].removeprefix("splash ").rsplit(" ", 1)
        for name, bundle, steps in row["kernels"]:
            role = next(
                (role for role in ("fwd", "dq") if role in name), "fused" if mode == "fused" else "dkv"
            )
            best[role] = min(best.get(role, (bundle * steps, blocks)), (bundle * steps, blocks))
    if not best:
        return None
    ways = [["fwd", "dkv", "dq"], ["fwd", "fused"]] if len(best) > 1 else [["fwd"]]
    return min(
        (sum(best[role][0] for role in way), "splash " + ", ".join(f"{role} {best[role][1]}" for role in way))
        for way in ways
        if all(role in best for role in way)
    )


def compile_chip(options: ScheduleOptions, chip: str, folder: Path, first: int) -> None:
    """Measures the cases from number `first` on for one chip and prints a JSON object in a line for each. libtpu must
    write to `folder`."""
    device = described_devices(chip)[0]
    seen: set[str] = set()
    for case in itertools.islice(cases(options), first, None):
        try:
            row = measure(case, options, chip, device, folder, seen)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            # Some of splash attention's block sizes do not fit the chip's memory.
            row = {"cost": None, "detail": str(error).splitlines()[0][:100]}
            bundles(folder, seen)
        print(json.dumps({"kind": case.kind, "label": case.label, **row}), flush=True)


def run_chip(options: ScheduleOptions, chip: str) -> Iterator[dict[str, Any]]:
    """The costs of all cases for one chip. A form of XLA or another library that makes libtpu abort has none."""
    todo, done = list(cases(options)), 0
    while done < len(todo):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
            for row in _run_from(options, chip, done, folder, errors):
                done += 1
                yield row
            errors.seek(0)
            lines = errors.read().strip().splitlines() or ["no message"]
        if done < len(todo):
            case = todo[done]
            if case.label == "ours":
                raise RunError(f"compiling {case.kind} for {chip} failed: {lines[-1][:200]}")
            yield {"kind": case.kind, "label": case.label, "cost": None, "detail": lines[-1][:100]}
            done += 1


def _run_from(
    options: ScheduleOptions, chip: str, first: int, folder: str, errors: IO[str]
) -> Iterator[dict[str, Any]]:
    """`compile_chip` in a separate process, because libtpu reads its flags only once, when it is loaded. Its messages
    go to a file, because a pipe that nobody reads stops the process when it is full."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
    }
    code = (
        "import sys, json, pathlib; from eval.chips import tpu_schedule as s; o = json.loads(sys.argv[1]); "
        "s.compile_chip(s.ScheduleOptions(**o), sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[4]))"
    )
    line = [sys.executable, "-c", code, json.dumps(dataclasses.asdict(options)), chip, folder, str(first)]
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("{"):
                yield json.loads(text)


@command(
    ScheduleOptions(),
    "eval.tpu_schedule",
    "Instruction schedules of the TPU kernels, compiled without a TPU.",
)
def main(options: ScheduleOptions) -> None:
    prepare_compiler()
    table = Table(
        "chip", "work", "ours", "bundles x steps", "MiB read", "least", "in tiles", "memory", "of bound", "other",
        "which", "times fewer",
        title=f"{options.heads} heads of {options.head_dim}, {options.length} tokens, bfloat16",
    )  # fmt: skip
    for chip in options.chips:
        rows: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
        for row in run_chip(options, chip):
            rows[row["kind"]].append(row)
            print(f"{chip} {row['kind']}: {row['label']}: {row['cost']} ({row['detail']})", file=sys.stderr)
        for kind, found in rows.items():
            ours = next(row for row in found if row["label"] == "ours")
            other = best_other(found)
            bound = max(ours.get("least") or 0, ours.get("memory") or 0)
            table.add(
                chip,
                kind,
                ours["cost"],
                ours["detail"],
                f"{ours.get('fetched', 0) / 2**20:.1f}",
                *(str(ours.get(name) or "") for name in ("least", "tiled", "memory")),
                "" if not (bound and ours["cost"]) else f"{ours['cost'] / bound:.2f}",
                *(("", "") if other is None else (str(other[0]), other[1])),
                "" if other is None or not ours["cost"] else f"{other[0] / ours['cost']:.2f}",
            )
    table.show()
