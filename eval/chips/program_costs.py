"""The bytes that a compiled program exchanges between chips. Unlike in the compiler's own analysis, loops count as
often as they run."""

from __future__ import annotations

import collections
import math
import re
from typing import Any

# Of types whose names do not end with them; 8-bit floats are the rest.
_BITS = {"bf16": 16}
_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def collective_bytes(hlo: str) -> dict[str, float]:
    """Bytes that each device receives from others while a compiled program runs once, by kind of communication.

    With shards of s bytes on n devices and ring algorithms, these are (n - 1) s for all-gather and reduce-scatter,
    twice that for all-reduce, (n - 1) / n of the bytes of an array for all-to-all, and all of them for
    collective-permute.

    Args:
      hlo: the text of the compiled and partitioned program, with the shapes of one device.
    """
    bodies, entry = computations(hlo)
    totals: dict[str, float] = collections.defaultdict(float)
    # An operation that overlaps with several computations appears in each of them, under the same numbers. If some of
    # them are in a loop, it is still one operation, in progress during the loop: its fewest runs count.
    overlapping: dict[tuple[str, ...], tuple[int, str, float]] = {}

    def walk(name: str, times: int) -> None:
        for line in bodies.get(name, ()):
            kind = re.search(r"= (.*?) (" + "|".join(_KINDS) + r")(-start)?\(", line)
            if kind is not None:
                shapes, what, start = kind.groups()
                scattered = what == "all-reduce" and name.startswith("all-reduce-scatter")
                what = "reduce-scatter" if scattered else what
                received = _received(what, _result_bytes(shapes, what, bool(start)), line, scattered)
                chain = re.search(r'channel_id=(\d+).*chain_id="(\d+)"', line)
                if chain is None:
                    totals[what] += times * received
                else:
                    before = overlapping.get(chain.groups(), (times, what, received))
                    overlapping[chain.groups()] = min(before, (times, what, received))
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
    for times, what, received in overlapping.values():
        totals[what] += times * received
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


def array_bytes(shapes: str) -> int:
    """The bytes of all arrays in the text of a type, such as (f32[2,3], bf16[4])."""
    return int(sum(_each_bytes(shapes)))


def _each_bytes(shapes: str) -> list[float]:
    found = re.findall(r"\b(pred|bf16|f8\w*|[fsuc](\d+))\[([\d,]*)\]", shapes)
    sizes = []
    for kind, number, dims in found:
        bits = _BITS.get(kind, int(number or 8))
        sizes.append(bits / 8 * math.prod(int(n) for n in dims.split(",") if n))
    return sizes


def _result_bytes(shapes: str, what: str, start: bool) -> float:
    sizes = _each_bytes(shapes)
    if start and what != "all-reduce":
        # (operands, results, sometimes counters): the numbers of results and operands are equal.
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
