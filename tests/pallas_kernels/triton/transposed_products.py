"""Finds products of transposed products in a kernel's code, which Triton below 3.7.1 miscompiles on Hopper."""

from __future__ import annotations

import re
from typing import Any


def transposed_products(code: str) -> list[str]:
    """The lines of Triton's code (TTIR) that multiply another product's result transposed.

    What is done to the result in between does not matter, except that an exponential of it counts as something new.
    """
    # A value is its operation and the values that this reads.
    values: dict[str, tuple[str, list]] = {}
    blocks: list[tuple[list, int]] = []
    products = []
    for line in code.splitlines():
        found = re.match(r'\s*(?:(%\w+)(?::(\d+))? = )?"?([a-z]+\.\w+)"?(.*?)(?: loc\(|$)', line)
        if found is None:
            continue
        name, count, operation, rest = found.groups()
        used = [values[x] for x in re.findall(r"%\w+(?:#\d+)?", rest) if x in values]
        if operation == "scf.yield":
            merged, yields = blocks.pop()
            for value, more in zip(merged, used):
                value[1].append(more)
            if yields > 1:
                blocks.append((merged, yields - 1))
        elif operation in ("scf.for", "scf.if") and name:
            # What a loop carries and results in is one value, which may come from before it or from its body.
            merged = [(operation, []) for _ in range(int(count or 1))]
            given = re.findall(r"(%\w+) = (%\w+(?:#\d+)?)", rest.partition("iter_args")[2])
            for value, (inner, first) in zip(merged, given):
                value[1].append(values[first])
                values[inner] = value
            blocks.append((merged, 1 if operation == "scf.for" else 2))
            values |= {name + (f"#{i}" if count else ""): value for i, value in enumerate(merged)}
        elif name:
            values[name] = (operation, used)
            if operation == "tt.dot":
                products.append((line, used[:2]))

    def found_in(value: Any, transposed: bool, seen: set) -> bool:
        operation, sources = value
        if operation == "tt.dot":
            return transposed
        if operation in ("tt.load", "math.exp", "math.exp2", "arith.cmpf") or (id(value), transposed) in seen:
            return False
        seen.add((id(value), transposed))
        return any(found_in(x, transposed or operation == "tt.trans", seen) for x in sources)

    return [line for line, factors in products if any(found_in(x, False, set()) for x in factors)]
