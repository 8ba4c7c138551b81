"""Compares TLinFormer's operations with its equations: python -m eval.tlinformer_operations [--picture FILE.png].

Tang, arXiv:2508.20407, gives the cost of a cache miss (equation 4) and of a hit (equation 5) for a block of H + 2
layers, with N tokens so far, the windows W_og and W_oh, and the width D:

    miss  D [N (2 W_oh + W_og) + H (W_oh^2 + W_og^2 + W_og W_oh) + W_og^2 - W_og W_oh]
    hit   D [N - W_og + (H + 1) W_oh + (H + 2) W_og^2]

This command counts the multiplications of all matrix products in the traced program, in the branches and the turns of
loops that run after N tokens, without results that nothing reads: for the first token of a window ("first"), for a
token in its middle ("hit"), and for all its tokens one by one ("miss"), which is what equation 4 counts. Then it fits a
straight line through each count over the tokens of history. "pairs" is the slope of attention's pairs alone by the
equations, with the values, over all blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval
from matplotlib.figure import Figure

from brl_jax.fields import Length
from eval.harness.options import OutputOptions
from eval.harness.output import Measured, study
from eval.harness.pictures import legend_outside, line_styles, panels
from eval.harness.table import straight_line
from eval.speed.generation import TLINFORMER, NetworkOptions
from train.engine.errors import UserError
from train.engine.flops import matrix_flops

KINDS = ("miss", "first", "hit")


@dataclasses.dataclass(frozen=True)
class OperationsOptions(NetworkOptions, OutputOptions):
    """The network, by default the paper's, and the numbers of tokens."""

    lengths: tuple[Length, ...] = (4096, 8192, 16384, 32768)
    """Tokens so far, N; multiples of the window."""
    picture: str | None = None
    """A .png file to draw."""

    def __post_init__(self):
        if len(self.lengths) < 2 or any(n % self.window or n <= self.window for n in self.lengths):
            raise ValueError(
                f"lengths must be two or more multiples of window={self.window} above it, got {self.lengths}"
            )


def paper_cost(kind: str, tokens: int, o: OperationsOptions) -> int:
    """Equation 4 ("miss") or 5 ("hit") of the module's text, over all blocks."""
    n, og, oh, h = tokens, o.window, o.context, o.hidden
    one = {
        "miss": n * (2 * oh + og) + h * (oh**2 + og**2 + og * oh) + og**2 - og * oh,
        "hit": n - og + (h + 1) * oh + (h + 2) * og**2,
    }[kind]
    return o.layers // (h + 2) * o.width * one


def pair_slope(kind: str, o: OperationsOptions) -> int:
    """Multiplications of attention's pairs for each token of history, scores and values: twice the equations' number,
    without the last block's restore."""
    blocks = o.layers // (o.hidden + 2)
    if kind == "hit":
        return 2 * o.width * blocks
    rows = {"miss": o.window, "first": 1}[kind]
    return 2 * o.width * (blocks * (o.context + rows) + (blocks - 1) * o.context)


def counted(options: OperationsOptions, tokens: int) -> dict[str, float]:
    """Multiplications of the traced programs with `tokens` tokens of history."""
    model = options.model(TLINFORMER)
    params = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    empty = jax.eval_shape(functools.partial(model.init_cache, 1, tokens + options.window))

    def count(num_tokens: int, window_index: int) -> float:
        places = {"length": np.int32(num_tokens), "window_index": np.int32(window_index)}

        def place(path: Any, leaf: Any) -> Any:
            return places.get(jax.tree_util.keystr(path[-1:], simple=True), leaf)

        def step(params: Any, token: Any, cache: Any) -> Any:
            return model.apply(params, token, cache=jax.tree_util.tree_map_with_path(place, cache))

        with jax.disable_jit(), jax.ensure_compile_time_eval():  # loops and branches on known values are run
            traced = jax.make_jaxpr(step)(params, jax.ShapeDtypeStruct((1, 1), jnp.int32), empty).jaxpr
        used, _ = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
        return matrix_flops(used, "cpu") / 2

    first = count(tokens, 0)
    hit = count(tokens + options.window // 2, tokens // options.window)
    return {"miss": first + (options.window - 1) * hit, "first": first, "hit": hit}


def measure(options: OperationsOptions) -> Iterator[Measured]:
    """The counts at each number of tokens, then the lines through them."""
    try:
        options.model(TLINFORMER)
    except ValueError as error:
        raise UserError(str(error)) from error
    rows: list[dict[str, Any]] = []
    for tokens in options.lengths:
        paper = {f"paper_{kind}": paper_cost(kind, tokens, options) for kind in ("miss", "hit")}
        rows.append({"tokens": tokens, **counted(options, tokens), **paper})
        yield Measured(rows[-1], options)
    lines = {
        kind: straight_line(options.lengths, [row[kind] for row in rows])
        | {"pairs": pair_slope(kind, options)}
        for kind in KINDS
    }
    yield Measured({"lines": lines}, options)


def draw(measured: list[Measured]) -> Figure:
    """The counts, and the equations twice (for scores and values), over the tokens so far."""
    figure, [[axes]] = panels(1, 1, (9, 5))
    rows, options = [each.result for each in measured[:-1]], measured[0].example
    x = [row["tokens"] for row in rows]
    styles = line_styles([*KINDS, "equation 4", "equation 5"])
    for kind in KINDS:
        axes.plot(x, [row[kind] for row in rows], label=f"{kind}, counted", **styles[kind])
    for name, kind in (("equation 4", "miss"), ("equation 5", "hit")):
        y = [2 * paper_cost(kind, int(n), options) for n in x]
        axes.plot(x, y, label=f"twice {name} ({kind})", **styles[name])
    axes.set(xscale="log", yscale="log", xlabel="tokens so far, N", ylabel="multiplications")
    legend_outside(axes)
    return figure


main = study(
    OperationsOptions(heads=12, head_dim=36),
    "eval.tlinformer_operations",
    "TLinFormer's operations and its equations.",
    measure,
    draw,
)
