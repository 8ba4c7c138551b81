"""What the devices of a compiled program exchange."""

import re
from typing import Any

import numpy as np

_FOUND = re.compile(
    r"= (\S+|\(.*?\)) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


def collectives(compiled: Any) -> list[tuple[str, int]]:
    """(kind, elements of a device's result) of each collective; an all-to-all has one array per device."""
    found = []
    for shapes, kind in _FOUND.findall(compiled.as_text()):
        sizes = [int(np.prod([int(n) for n in dims.split(",") if n])) for dims in _SHAPE.findall(shapes)]
        found.append((kind, sum(sizes) if kind == "all-to-all" else max(sizes)))
    return found
