"""Costs read from a program: the matrix products of a traced function, and the bytes that a compiled program exchanges
between chips. Loops count as often as they run, which the compiler's own analysis does not consider."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator
from typing import Any

from jax.extend import core

_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "c64": 8,
}
_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def matrix_flops(jaxpr: Any, platform: str = "tpu") -> float:
    """Floating-point operations of all matrix products in a traced function, two for each multiplied pair.

    Loops are multiplied by their length, kernels by their grid, and the work of each device under `shard_map` by the
    number of devices; of several branches, the most expensive one counts. Work that the backward pass repeats counts
    twice.

    Args:
      jaxpr: that of the function, from `jax.jit(f).trace(...).jaxpr`.
      platform: the platform whose branch counts where a function has one for each.
    """
    inner = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    chosen: dict[Any, int] = {}  # the branch that the platform takes, by the variable with its index
    total = 0.0
    for equation in inner.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            total += _product_flops(equation)
        elif name == "platform_index":
            kinds = [kind is None or platform in kind for kind in params["platforms"]]
            chosen[equation.outvars[0]] = kinds.index(True)
        elif name == "cond":
            branches = params["branches"]
            index = equation.invars[0]
            at = chosen.get(index) if isinstance(index, core.Var) else None
            total += max(
                matrix_flops(branch, platform)
                for branch in (branches if at is None else branches[at : at + 1])
            )
        else:
            total += _times(name, params) * sum(matrix_flops(part, platform) for part in _inside(params))
    return total


def _product_flops(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def _times(name: str, params: dict[str, Any]) -> int:
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        return math.prod(params["mesh"].shape.values())
    return math.prod(params["grid_mapping"].grid) if name == "pallas_call" else 1


def _inside(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, (core.Jaxpr, core.ClosedJaxpr)):
                yield part


def collective_bytes(hlo: str) -> dict[str, float]:
    """Bytes that each device receives from others while a compiled program runs once, by kind of communication.

    With shards of s bytes on n devices and ring algorithms, these are (n - 1) s for all-gather and reduce-scatter,
    twice that for all-reduce, (n - 1) / n of the bytes of an array for all-to-all, and all of them for
    collective-permute.

    Args:
      hlo: the text of the compiled and partitioned program, whose shapes are those of one device.
    """
    bodies, entry = computations(hlo)
    totals: dict[str, float] = collections.defaultdict(float)
    # An operation that overlaps with several computations appears in each of them, under the same numbers.
    seen: set[tuple[Any, ...]] = set()

    def walk(name: str, times: int) -> None:
        for line in bodies.get(name, ()):
            kind = re.search(r"= (.*?) (" + "|".join(_KINDS) + r")(-start)?\(", line)
            chain = re.search(r'channel_id=(\d+).*chain_id="(\d+)"', line)
            mark = None if chain is None else (*chain.groups(), times)
            if kind is not None and mark not in seen:
                if mark is not None:
                    seen.add(mark)
                shapes, what, start = kind.groups()
                scattered = what == "all-reduce" and name.startswith("all-reduce-scatter")
                what = "reduce-scatter" if scattered else what
                totals[what] += times * _received(
                    what, _result_bytes(shapes, what, bool(start)), line, scattered
                )
            if " while(" in line:
                [condition], [body] = (
                    re.findall(rf"{part}=%?([\w.-]+)", line) for part in ("condition", "body")
                )
                walk(body, times * trips(line, bodies.get(condition, ())))
            else:
                for called in re.findall(
                    r"(?:calls|to_apply|branch_computations)=\{?((?:%?[\w.-]+(?:, )?)+)", line
                ):
                    for callee in called.split(", "):
                        walk(callee.lstrip("%"), times)

    walk(entry, 1)
    return dict(totals)


def computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by name, and the name of the first to run."""
    bodies: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in hlo.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if head is not None:
            current = head[2]
            bodies[current] = []
            entry = current if head[1] else entry
        elif line.startswith("  ") and current:
            bodies[current].append(line)
    return bodies, entry


def trips(line: str, condition: Any) -> int:
    """How often a loop runs: the compiler's annotation, otherwise the number with which its counter is compared."""
    known = re.search(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)', line)
    if known is not None:
        return int(known[1])
    limits = [int(m[1]) for text in condition if (m := re.search(r"= s32\[\]\S* constant\((\d+)\)", text))]
    return max(limits, default=1)


def _result_bytes(shapes: str, what: str, start: bool) -> float:
    sizes = []
    for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        sizes.append(_BYTES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n))
    if start and what != "all-reduce":
        # (operands, results, sometimes counters): there are as many results as operands.
        return sizes[1] if what == "collective-permute" else sum(sizes[len(sizes) // 2 :])
    return sum(sizes)


def _received(what: str, size: float, line: str, scattered: bool) -> float:
    n = _group_size(line)
    match what:
        case "all-gather" | "all-to-all":
            return size * (n - 1) / n
        case "reduce-scatter":
            return size * (n - 1) / n if scattered else size * (n - 1)
        case "all-reduce":
            return 2 * size * (n - 1) / n
    return size


def _group_size(line: str) -> int:
    """Devices that communicate with each other."""
    if plain := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(plain[1].split(","))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{((?:'[^']*'(?:, ?)?)+)\}", line):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']*)'", mesh[2]))
    return 1
