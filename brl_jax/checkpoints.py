"""The format of a run's checkpoints: how one is chosen and read, for training and for `load_run`.

A checkpoint is the folder checkpoints/STEP with three items: "params", "rest" (everything else that a step changes) and
"meta", a JSON object.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from brl_jax.json_files import read_json

_META = {"config": dict, "score": float | None}


def absolute(folder: Any) -> Any:
    """The absolute path of a folder; Orbax would take gs://... for a name in the working directory."""
    return folder if "://" in os.fspath(folder) else folder.resolve()


def steps_in(folder: Any) -> list[int]:
    """The steps of the checkpoints in a folder, ascending, including damaged ones. Raises OSError."""
    if not folder.exists():
        return []
    names = [path.name for path in folder.iterdir()]
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def scores_in(folder: Any) -> dict[int, float]:
    """The scores that were measured at the checkpoints in a folder, by step; damaged ones have none."""
    scores = {}
    for step in steps_in(folder):
        try:
            score = read_meta(folder, step)["score"]
        except (OSError, ValueError):
            continue
        if score is not None:
            scores[step] = score
    return scores


def candidates(folder: Any, which: str) -> list[int]:
    """The steps of the checkpoints to try, in order.

    Args:
      which: "best" (the lowest score; like "last" if no score was measured), "last" (the newest one, then those
        before it) or a step.

    Raises:
      LookupError: there is no such checkpoint.
    """
    steps = steps_in(folder)
    scores = scores_in(folder) if which == "best" else {}
    if scores:
        return [min(scores, key=lambda step: scores[step])]
    chosen = steps[::-1] if which in ("best", "last") else [step for step in steps if str(step) == which]
    if not chosen:
        known = ", ".join(["best", "last", *map(str, steps)])
        there = f"expected one of {known}, got {which}," if steps else "no checkpoint"
        raise LookupError(f"{there} in {folder}")
    return chosen


def read_meta(folder: Any, step: int) -> dict[str, Any]:
    """The "meta" of a checkpoint.

    Raises:
      OSError: it is missing or cannot be read. ValueError: it is damaged.
    """
    return read_json(folder / str(step) / "meta" / "metadata", _META)


def read_arrays(folder: Any, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
    """Some items of a checkpoint, like these pytrees of ShapeDtypeStructs with shardings. Raises whatever Orbax and the
    storage raise. Each process reads its own parts without waiting for the others, which may have failed."""
    import jax
    import orbax.checkpoint as ocp

    silence_abandoned_tasks()
    args = {name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=here, active_processes={here})
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone) as checkpointer:
        items = checkpointer.restore(absolute(folder) / str(step), args=ocp.args.Composite(**args))
    return {name: items[name] for name in like}


def silence_abandoned_tasks() -> None:
    """Keeps reads and writes that Orbax abandons from printing tracebacks on stderr when they end.

    If one array of a checkpoint is damaged, or the storage refuses it, Orbax closes its event loop while TensorStore's
    threads still work on the others; each of these then finds the loop closed, long after the error was raised. The
    hook must therefore be in place before a checkpoint is opened, and stay.
    """
    before = sys.unraisablehook
    if getattr(before, "silences_abandoned_tasks", False):
        return

    def hook(unraisable: Any) -> None:
        abandoned = inspect.iscoroutine(unraisable.object) or "loop is closed" in str(unraisable.exc_value)
        if not abandoned:
            before(unraisable)

    hook.silences_abandoned_tasks = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook
