"""The format of a run's checkpoints: how one is chosen, read and checked, for training and for `load_run`.

A checkpoint is the folder checkpoints/STEP with three items: "params", "rest" (everything else that a step changes) and
"meta", a JSON object. Digests in "meta" cover the arrays of both items and "meta" itself, because the storage format
does not notice every flipped bit.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brl_jax.json_files import read_json

_META = {
    "digest": str,
    "digests": dict[str, str],
    "config": dict,
    "score": float | None,
}


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
    path = folder / str(step) / "meta" / "metadata"
    meta = read_json(path, _META)
    if meta["digest"] != _text_digest(meta):
        raise ValueError(f"{os.fspath(path)} is not what was saved")
    return meta


def seal(meta: Mapping[str, Any], items: Mapping[str, Any]) -> dict[str, Any]:
    """`meta` with the digests of these items and of itself."""
    sealed = {**meta, "digests": {name: digest(tree) for name, tree in items.items()}}
    return {**sealed, "digest": _text_digest(sealed)}


def read_arrays(folder: Any, step: int, meta: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Some items of a checkpoint.

    Args:
      meta: from `read_meta`. like: by item, a pytree of ShapeDtypeStructs with shardings.

    Raises:
      ValueError: the arrays are not those that were saved. Exception: whatever Orbax and the storage raise.
    """
    import orbax.checkpoint as ocp

    silence_abandoned_tasks()
    args = {name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
    # Orbax would take gs://... for a name in the working directory.
    where = folder if "://" in os.fspath(folder) else folder.resolve()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        items = checkpointer.restore(where / str(step), args=ocp.args.Composite(**args))
    for name in like:
        if digest(items[name]) != meta["digests"].get(name):
            raise ValueError(f"the arrays of {name} are not those that were saved")
    return {name: items[name] for name in like}


@jax.jit
def _bit_sums(leaves: list[jax.Array]) -> jax.Array:
    """For each array, the sum of its elements' bits as unsigned integers, modulo 2^32: exact in any order."""

    def bit_sum(x: jax.Array) -> jax.Array:
        bits = x
        if x.dtype != jnp.bool_:
            width = min(x.dtype.itemsize, 4)
            bits = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width])
        return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)

    return jnp.stack([bit_sum(x) for x in leaves])


def digest(tree: Any) -> str:
    """A hash of the bits of every array in a pytree, computed on the devices that hold the arrays."""
    leaves = jax.tree.leaves(tree)
    return hashlib.sha256(np.asarray(_bit_sums(leaves)).tobytes() if leaves else b"").hexdigest()[:16]


def _text_digest(meta: Mapping[str, Any]) -> str:
    values = {name: value for name, value in meta.items() if name != "digest"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


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
