"""What the devices of a compiled program bring each other."""

import re
from typing import Any

import numpy as np

_FOUND = re.compile(r"= \(?\w+\[([\d,]*)\]\S* (all-\w+|collective-permute|reduce-scatter)(?:-start)?\(")


def collectives(compiled: Any) -> list[tuple[str, int]]:
    """(kind, elements of a device's result) of each."""
    found = _FOUND.findall(compiled.as_text())
    return [(kind, int(np.prod([int(n) for n in dims.split(",") if n]))) for dims, kind in found]
