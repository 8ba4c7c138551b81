"""Every TPU kernel compiled for every chip, without a TPU: python -m eval.tpu_compile.

Each kernel, forward and backward in one program, in bfloat16, for each chip, length, head width and window (or number
of compressed tokens) asked for. Each program is compiled as users compile it, and once more to measure its temporary
memory, with all of it in HBM: the compiler otherwise keeps what fits in on-chip memory, which it does not count, so
that what is left over grows by leaps. The table gives that memory and how many times more it is at twice the longest
length: 2 where memory is a constant and a part for each token. Between shorter lengths it may leap, because the
compiler keeps other arrays alive together. What does not compile, or grows faster than the length at that doubling, is
named, and the exit status is 1.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from eval.tpu_schedule import TOPOLOGIES
from pallas_kernels import tpu
from train.config import parse_options
from train.errors import RunError, UserError, command, one_line

#: Keeps every temporary array in HBM; a chip looks at the one that its memories have.
_ALL_IN_HBM: dict[str, str | bool] = {
    "xla_tpu_cmem_memory_space_assignment": False,
    "xla_vf_vmem_memory_space_assignment": False,
    "xla_gf_vmem_memory_space_assignment": False,
}
#: How many times more memory twice the tokens may take. n log n takes 2.11 times as much from 2^18 to 2^19.
_DOUBLED = 2.05


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """What to compile."""

    chips: tuple[str, ...] = ("v4", "v5e", "v5p", "v6e", "7x")
    """Out of v4, v5e, v5p, v6e, 7x."""
    lengths: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18)
    """Tokens; the longest is compiled at twice its length as well."""
    windows: tuple[int, ...] = (64, 128, 256, 512)
    """Keys that a query sees; empty leaves local attention out."""
    compressed: tuple[int, ...] = (64, 128, 256)
    """Compressed tokens of compress and propagate; empty leaves them out."""
    heads: int = 8
    """Heads of query, key and value."""
    head_dims: tuple[int, ...] = (128, 64)
    """Features of a head."""

    def __post_init__(self) -> None:
        for chip in self.chips:
            if chip not in TOPOLOGIES:
                raise ValueError(f"chips must be out of {', '.join(TOPOLOGIES)}, got {chip}")
        for name in ("lengths", "windows", "compressed", "head_dims"):
            if any(size < 1 for size in getattr(self, name)):
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def _blocks(length: int, window: int, chip: str) -> Callable:
    """The block-sparse kernel on the window's own blocks."""
    size = min(256, -(-length // 128) * 128)
    rows = [range(max(0, row * size - window + 1) // size, row + 1) for row in range(-(-length // size))]

    def mask(queries, keys):
        return (keys <= queries) & (keys > queries - window)

    return functools.partial(
        tpu.block_attention, key_blocks=rows, block_q=size, block_k=size, mask=mask, chip=chip
    )


def cases(
    options: CompileOptions, chip: str, length: int, head_dim: int
) -> Iterator[tuple[str, Callable, list[tuple[int, ...]]]]:
    """(what, function, shapes of its arguments) of everything asked for at one length."""
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


def temporary_bytes(function: Callable, shapes: Sequence[tuple[int, ...]], device: Any) -> int:
    """Temporary memory of forward and backward, compiled for a device that need not be there.

    Arrays arrive as projections leave them, heads side by side, so that no copy into another layout is counted.
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
    """How many times more memory twice the longest length takes, in words, and whether that is more than linear."""
    if longest is None or doubled is None:
        return "", False
    if not longest:
        return (f"{doubled} after 0" if doubled else "0"), doubled > 0
    return f"{doubled / longest:.2f}", doubled > _DOUBLED * longest


def main(argv: Sequence[str]) -> None:
    """Prints the table; see the module's text and --help."""
    options = parse_options(
        CompileOptions(),
        argv,
        prog="python -m eval.tpu_compile",
        about="Every TPU kernel compiled for every chip, without a TPU.",
    )
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("libtpu is not installed: pip install 'brl-jax[tpu]'")
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    from jax.experimental import topologies

    console, failures = Console(width=160), []
    lengths = sorted(set(options.lengths))
    table = Table(title=f"{options.heads} heads, bfloat16: MiB of temporary memory, forward and backward")
    for title in ("chip", "head dim", "work", *(f"n = {length}" for length in lengths), "for 2 n"):
        table.add_column(title)
    for chip, head_dim in itertools.product(options.chips, options.head_dims):
        device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
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
            table.add_row(chip, str(head_dim), what, *cells, words)
            if faster:
                failures.append(
                    f"{chip}, head dim {head_dim}, {what} takes {words} times the memory at n = {2 * lengths[-1]}"
                )
    console.print(table)
    if failures:
        raise RunError(f"{len(failures)} failures, the first: {failures[0]}")


if __name__ == "__main__":
    sys.exit(command(main, "eval.tpu_compile"))
