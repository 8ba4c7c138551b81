"""Runs some cases of each test, different ones every week: a quick check that covers everything over time.

A run of the whole suite takes `--cases 0.5`, one case of about half of the test functions; `--cases 1` takes one case
of each, `--cases N` N, and `--cases 0` all. Runs that name files or use -k take all cases. The week selects them, so
that a failure can be repeated, and its mend is checked by the same cases; `--cases-of WEEK` selects as in another week.
Tests that share a group (such as the laws of one mechanism, which share its compiled networks) select the same ones if
they can."""

from __future__ import annotations

import collections
import datetime
import hashlib
from collections.abc import Sequence
from typing import Any


def group_of(item: Any) -> str | None:
    """The name of a test's group for xdist."""
    marker = item.get_closest_marker("xdist_group")
    if marker is None:
        return None
    return marker.args[0] if marker.args else marker.kwargs.get("name")


def this_week() -> str:
    """The year and the number of the week, as in 2026-W48."""
    return datetime.datetime.now(datetime.UTC).strftime("%G-W%V")


def left_out(items: Sequence[Any], cases: float, seed: str) -> list[Any]:
    """The items beyond the first `cases` of their function, in the order given by `seed`; a fraction of cases is that
    share of the functions, with one item each."""

    def digest(name: str | None) -> str:
        return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()

    def order(item: Any) -> list[str]:
        return [digest(group_of(item)), digest(item.nodeid)]

    def kept(function: str) -> int:
        return int(cases) or int(digest(function)[:8], 16) < cases * 16**8

    functions = collections.defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    return [item for name, group in functions.items() for item in sorted(group, key=order)[kept(name) :]]
