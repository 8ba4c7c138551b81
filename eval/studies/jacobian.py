"""How strongly outputs depend on far inputs: python -m eval.jacobian --workdir DIR [DIR ...] [--picture FILE.png].

The sensitivity of BRL-Attention (OpenReview Vpyg3fqXbl, section 2.2), measured on trained networks of any task. With
x_p the p-th row that enters the first layer (token and position) and y_i the i-th normalised output of the last,

    s(i, p) = |d y_i / d x_p|_F / sqrt(D),

which is 1 for an output that is its own input. Random directions of y_i estimate the Frobenius norm, with one backward
pass each: E |v^T J|^2 = |J|_F^2 for a vector v of unit normal numbers. The command prints the root mean square over
positions i and sequences, by the distance |i - p|.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure

from brl_jax.fields import Count, Rows, Seed
from brl_jax.models.stack import Stack
from eval.harness.options import StudyOptions
from eval.harness.output import each_run, study
from eval.harness.pictures import legend_outside, line_styles, panels, plain_log_axis
from eval.harness.runs import first_rows, open_run, run_labels
from eval.tasks.context import window_reach
from train.cli.summary import mechanism_names
from train.engine.errors import UserError
from train.engine.step import Objective
from train.tasks.every import TASKS

# Random directions of each output.
_PROBES = 4


@dataclasses.dataclass(frozen=True)
class JacobianOptions(StudyOptions):
    """What to measure."""

    sequences: Rows = 4
    """Sequences to read, the first of the split."""
    positions: Count = 16
    """Outputs of each sequence to measure, spaced evenly up to the last token."""
    seed: Seed = 0
    """Seed of the random directions."""


def stack_io(objective: Objective, params: Any, batch: Any, moved: Any) -> tuple[Array, Array]:
    """The input rows and the output of a network's stack of layers while its objective is computed: (B, T, D) each.
    `moved` (B, T, D) is added to the stack's input."""
    seen: list[tuple[Array, Array]] = []

    def intercept(run: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        if not isinstance(context.module, Stack) or context.method_name != "__call__":
            return run(*args, **kwargs)
        x = args[0] if moved is None else args[0] + moved
        result = run(x, *args[1:], **kwargs)
        seen.append((x, result[0]))
        return result

    rows = jax.tree.leaves(batch)[0].shape[0]
    with nn.intercept_methods(intercept):
        objective.sums(params, objective.init_memory(rows), batch, None)
    if len(seen) != 1:
        raise UserError(
            f"--workdir: expected a network that calls one stack of layers once, got {len(seen)} calls"
        )
    return seen[0]


def sensitivities(
    objective: Objective, params: Any, batch: Any, places: Int[Array, "B Q"], probes: int, key: Array
) -> Float[Array, "B Q T"]:
    """s(i, p) of the module's text, squared, for the positions i in `places` of each row and every p."""
    shape = jax.eval_shape(lambda: stack_io(objective, params, batch, None)[0])
    zeros = jnp.zeros(shape.shape, shape.dtype)
    _, pull = jax.vjp(lambda moved: stack_io(objective, params, batch, moved)[1], zeros)
    rows = jnp.arange(shape.shape[0])

    def one(args: Any) -> Array:
        place, key = args
        random = jax.random.normal(key, (shape.shape[0], shape.shape[2]))
        v = jnp.zeros(shape.shape, jnp.float32).at[rows, place].set(random)
        (pulled,) = pull(v.astype(shape.dtype))
        return jnp.sum(jnp.square(pulled.astype(jnp.float32)), axis=-1) / shape.shape[2]

    count = places.shape[1]
    keys = jax.random.split(key, count * probes)
    # One backward pass at a time: it needs the memory of a training step.
    squares = jax.lax.map(one, (jnp.repeat(places.T, probes, axis=0), keys))
    return jnp.moveaxis(squares.reshape(count, probes, *squares.shape[1:]).mean(1), 0, 1)


def spaced_places(lengths: Int[np.ndarray, " B"], count: int) -> Int[np.ndarray, "B Q"]:
    """This many positions in each row, spaced evenly up to its last token; rows that are too short repeat some."""
    ends = np.stack([np.linspace(0, length, count + 1)[1:].astype(np.int64) for length in lengths])
    return np.maximum(ends - 1, 0)


def by_distance(
    squares: Float[np.ndarray, "B Q T"], places: Int[np.ndarray, "B Q"], lengths: Int[np.ndarray, " B"]
) -> tuple[list[dict[str, Any]], int]:
    """Root mean squares over ranges of distances (0, 1, 2 to 3, 4 to 7, ...), and the greatest distance with a nonzero
    sensitivity. Leaves out pairs beyond a row's length, and the later tokens of a decoder, which move nothing."""
    tokens = np.arange(squares.shape[2])
    distance = np.abs(places[..., None] - tokens)
    exists = tokens < lengths[:, None, None]
    if not (squares * exists)[tokens > places[..., None]].any():
        exists = exists & (tokens <= places[..., None])
    exists = np.broadcast_to(exists, squares.shape)
    farthest = int(distance[exists & (squares > 0)].max(initial=0))
    ranges, low = [], 0
    while low <= distance[exists].max(initial=0):
        high = max(1, 2 * low)
        chosen = exists & (distance >= low) & (distance < high)
        if chosen.any():
            value = math.sqrt(float(squares[chosen].mean(dtype=np.float64)))
            ranges.append({"first": low, "end": high, "sensitivity": value})
        low = high
    return ranges, farthest


def measure_run(options: JacobianOptions, workdir: str) -> dict[str, Any]:
    """The JSON object of one run."""
    run = open_run(list(TASKS.values()), workdir, options.checkpoint)
    objective = run.task.objective(run.model, run.config)
    batch = first_rows(run, options.split, options.sequences)
    shape = jax.eval_shape(lambda: stack_io(objective, run.params, batch, None)[0]).shape
    lengths = np.full(shape[0], shape[1])
    if "lengths" in batch:
        # Some networks put a learned token in front of the others.
        extra = shape[1] - batch["tokens"].shape[-1]
        lengths = batch["lengths"].reshape(-1) + extra
    places = spaced_places(lengths, options.positions)
    squares = jax.jit(
        lambda params, batch, places, key: sensitivities(objective, params, batch, places, _PROBES, key)
    )(run.params, batch, jnp.asarray(places), jax.random.key(options.seed))
    ranges, farthest = by_distance(np.asarray(squares), places, lengths)
    return {
        "workdir": workdir,
        "task": run.task.name,
        "mechanism": mechanism_names(run.config.model),
        "step": run.step,
        "length": int(shape[1]),
        "sequences": int(shape[0]),
        "reach": window_reach(
            run.config.model.mechanisms, int(shape[1]), run.config.model.dimensions.is_causal
        ),
        "farthest": farthest,
        "sensitivity": ranges,
    }


def draw(results: Sequence[dict[str, Any]]) -> Figure:
    """The sensitivity by distance, one curve for each run, and the reach of each run's windows."""
    figure, [[axes]] = panels(1, 1, (10, 5.5))
    styles = line_styles([result["workdir"] for result in results])
    for label, result in zip(run_labels(results), results, strict=True):
        ranges = [each for each in result["sensitivity"] if each["first"] > 0 and each["sensitivity"] > 0]
        middles = [math.sqrt(each["first"] * max(each["end"] - 1, 1)) for each in ranges]
        values = [each["sensitivity"] for each in ranges]
        axes.plot(middles, values, label=label, markersize=5, **styles[result["workdir"]])
    for reach in sorted({each["reach"] for each in results if each["reach"] < each["length"] - 1}):
        axes.axvline(reach, color="#999999", linestyle=":", label=f"reach of windows alone, {reach}")
    axes.set_xscale("log", base=2)
    axes.set(
        yscale="log",
        xlabel="distance between input and output, tokens",
        ylabel="sensitivity |dy / dx| / sqrt(D), root mean square",
        title="how strongly outputs depend on far inputs (values of exactly 0 are not drawn)",
    )
    plain_log_axis(axes.xaxis)
    legend_outside(axes)
    return figure


main = study(
    JacobianOptions(),
    "eval.jacobian",
    "How strongly outputs depend on far inputs.",
    each_run(measure_run),
    draw,
)
