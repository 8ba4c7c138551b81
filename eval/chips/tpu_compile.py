"""Compiles every TPU kernel for every chip, without a TPU: python -m eval.tpu_compile.

Each program has a kernel forward and backward in bfloat16. It is compiled as users compile it, and a second time with
all temporary memory in HBM to measure that memory: otherwise the compiler places arrays that fit in on-chip memory,
which it does not count, and the rest grows in jumps. The growth from the longest length to twice that length is a
factor of 2 if memory is a constant plus a share of each token. The exit status is 1 if a program does not compile or
its memory grows faster.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from brl_jax.fields import Checked, Count, Length, Width
from eval.chips.stages import stages
from eval.chips.tpu_chips import SMALLEST_TOPOLOGIES, described_devices, prepare_compiler
from eval.harness.options import check_names, command
from eval.harness.table import Table
from pallas_kernels import tpu
from train.engine.errors import RunError, one_line

#: Keeps every temporary array in HBM; each kind of chip uses the option for its own memories.
_ALL_IN_HBM: dict[str, str | bool] = {
    "xla_tpu_cmem_memory_space_assignment": False,
    "xla_vf_vmem_memory_space_assignment": False,
    "xla_gf_vmem_memory_space_assignment": False,
}
#: The largest allowed growth of memory for twice the tokens. n log n grows 2.11 times from 2^18 to 2^19.
_DOUBLED = 2.05


@dataclasses.dataclass(frozen=True)
class CompileOptions(Checked):
    """What to compile."""

    chips: tuple[str, ...] = ("v4", "v5e", "v5p", "v6e", "7x")
    """Chips to compile for: any of v4, v5e, v5p, v6e, 7x."""
    lengths: tuple[Length, ...] = (1 << 10, 1 << 14, 1 << 18)
    """Sequence lengths in tokens; twice the longest length is compiled as well."""
    windows: tuple[Count, ...] = (64, 128, 256, 512)
    """Keys that a query sees; without any, local attention is left out."""
    compressed: tuple[Count, ...] = (64, 128, 256)
    """Numbers of compressed tokens for compress and propagate; without any, both are left out."""
    recurrences: bool = True
    """Whether linear attention, the gated delta rule, and both with decay by feature are compiled."""
    heads: Width = 8
    """Heads of query, key and value."""
    head_dims: tuple[Width, ...] = (128, 64)
    """Head dimensions."""

    def __post_init__(self) -> None:
        check_names(self, chips=SMALLEST_TOPOLOGIES)


def _blocks(length: int, window: int, chip: str) -> Callable:
    """The block-sparse kernel on the window's own blocks."""
    size = min(256, -(-length // 128) * 128)
    rows = [range(max(0, row * size - window + 1) // size, row + 1) for row in range(-(-length // size))]

    def mask(queries, keys):
        return (keys <= queries) & (keys > queries - window)

    return functools.partial(
        tpu.block_attention, key_blocks=rows, block_q=size, block_k=size, mask=mask, chip=chip
    )


def _recurrence(chip: str, name: str, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Sums of products, or a delta rule or decay with gates made of the keys."""
    heads, size = key.shape[2:]
    state = jnp.zeros((key.shape[0], heads, size, size))
    gates = jax.nn.sigmoid(key.astype(jnp.float32))
    gate = gates[..., 0]
    factors = {
        "linear": tpu.Factors(),
        "gated delta": tpu.Factors(gate, gate, -gate, gate, gate[:, :: tpu.CHUNK]),
        "gla": tpu.Factors(log_decay=-gates),
        "kda": tpu.Factors(log_decay=-gates, beta=gate),
    }[name]
    return tpu.recurrence(query, key, value, state, None, factors, chip=chip).total.astype(query.dtype)


def cases(
    options: CompileOptions, chip: str, length: int, head_dim: int
) -> Iterator[tuple[str, Callable, list[tuple[int, ...]]]]:
    """(name, function, shapes of its arguments) of every requested program at one length."""
    heads = options.heads
    ones = jnp.ones((heads,), jnp.float32)
    long = (1, length, heads, head_dim)
    for window in options.windows:
        attend = functools.partial(tpu.window_attention, left=window - 1, right=0, chip=chip)
        yield f"window {window}", attend, [long] * 3
        yield f"blocks, window {window}", _blocks(length, window, chip), [long] * 3
    for tokens in options.compressed:
        short = (1, tokens, heads, head_dim)
        read = functools.partial(tpu.compress, gamma=ones, chip=chip)
        yield f"compress {tokens}", read, [short, long, long, long]
        yield (
            f"propagate {tokens}",
            functools.partial(tpu.propagate, strength=ones, chip=chip),
            [long, short, short],
        )
        size = min(512, length // 2)
        read = functools.partial(
            tpu.compress_blocks, gamma=ones, block_size=size, history_size=size, chip=chip
        )
        many = (1, length // size, tokens, heads, head_dim)
        yield f"compress_blocks {tokens}", read, [many, long, long, long]
    if options.recurrences:
        for name in ("linear", "gated delta", "gla", "kda"):
            yield name, functools.partial(_recurrence, chip, name), [long] * 3


def temporary_bytes(function: Callable, shapes: Sequence[tuple[int, ...]], device: Any) -> int:
    """Temporary memory of forward and backward, compiled for a device that need not exist.

    Arrays have the layout of a projection, with heads side by side, so that no copy into another layout counts.
    """
    sharding = jax.sharding.SingleDeviceSharding(device)
    flat = [
        jax.ShapeDtypeStruct((*s[:-2], math.prod(s[-2:])), jnp.bfloat16, sharding=sharding) for s in shapes
    ]

    def run(arrays):
        out, pull = jax.vjp(function, *(x.reshape(s) for x, s in zip(arrays, shapes)))
        return [x.reshape(*x.shape[:-2], -1) for x in (out, *pull(out))]

    lowered = jax.jit(run).lower(flat)
    lowered.compile()
    memory = lowered.compile(compiler_options=_ALL_IN_HBM).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def growth(longest: int | None, doubled: int | None) -> tuple[str, bool]:
    """The growth of memory from the longest length to twice that length as text, and whether it is more than
    linear."""
    if longest is None or doubled is None:
        return "", False
    if not longest:
        return (f"{doubled} after 0" if doubled else "0"), doubled > 0
    return f"{doubled / longest:.2f}", doubled > _DOUBLED * longest


@command(CompileOptions(), "eval.tpu_compile", "Every TPU kernel compiled for every chip, without a TPU.")
def main(options: CompileOptions) -> None:
    prepare_compiler()
    console, failures = Console(width=160), []
    lengths = sorted(set(options.lengths))
    table = Table(
        "chip", "head dim", "work", *(f"n = {length}" for length in lengths), "for 2 n",
        title=f"{options.heads} heads, bfloat16: MiB of temporary memory, forward and backward",
    )  # fmt: skip
    with stages("tpu_compile") as begin:
        for chip, head_dim in itertools.product(options.chips, options.head_dims):
            begin(f"compiling for {chip}, head dimension {head_dim}")
            device = described_devices(chip)[0]
            rows: dict[str, list[int | None]] = collections.defaultdict(list)
            for length in (*lengths, 2 * lengths[-1]):
                for what, function, shapes in cases(options, chip, length, head_dim):
                    started = time.monotonic()
                    try:
                        rows[what].append(temporary_bytes(function, shapes, device))
                    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
                        rows[what].append(None)
                        failures.append(
                            f"{chip}, head dim {head_dim}, n = {length}, {what} does not compile: {one_line(error)}"
                        )
                    console.print(
                        f"{chip} {head_dim} n={length} {what}: {rows[what][-1]} bytes"
                        f" ({time.monotonic() - started:.1f} s)",
                        style="dim",
                        highlight=False,
                    )
            for what, sizes in rows.items():
                cells = ["fails" if size is None else f"{size / 2**20:.2f}" for size in sizes[:-1]]
                words, faster = growth(*sizes[-2:])
                table.add(chip, head_dim, what, *cells, words)
                if faster:
                    failures.append(
                        f"{chip}, head dim {head_dim}, {what} takes {words} times the memory at n = {2 * lengths[-1]}"
                    )
    table.show()
    if failures:
        raise RunError(f"{len(failures)} failures, the first: {failures[0]}")
