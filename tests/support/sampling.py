"""Runs some cases of each slow test, different ones at every commit: a quick check that covers everything over time.

python -m pytest -m slow --cases 2

runs every slow test function with at most two of its slow parameters. The commit selects them, so a run can be
repeated; `--cases-of NAME` selects as another commit would. Tests that share a group (such as the laws of one
mechanism, which share its compiled networks) select the same ones if they can."""

from __future__ import annotations

import collections
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def group_of(item: Any) -> str | None:
    """The name of a test's group for xdist."""
    marker = item.get_closest_marker("xdist_group")
    if marker is None:
        return None
    return marker.args[0] if marker.args else marker.kwargs.get("name")


def commit() -> str:
    """The current commit, or nothing outside a repository."""
    line = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(line, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def left_out(items: Sequence[Any], cases: int, seed: str) -> list[Any]:
    """The slow items beyond the first `cases` of their function, in the order given by `seed`."""

    def order(item: Any) -> list[str]:
        names = group_of(item), item.nodeid
        return [hashlib.sha256(f"{seed} {name}".encode()).hexdigest() for name in names]

    functions = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            functions[item.nodeid.partition("[")[0]].append(item)
    return [item for group in functions.values() for item in sorted(group, key=order)[cases:]]
