"""Which tokens BRL's compressed tokens connect: python -m eval.regularizer --workdir DIR [--picture FILE.png].

The reconstructed regularizer score RRS = S_prop S_comp of BRL-Attention (OpenReview Vpyg3fqXbl, equation 15 and figure
14), of the layers of a trained decoder. The tokens of a block read its compressed tokens with the weights S_prop (T, M)
of equation 9, and these read the history before the block with the weights S_comp (M, R) of equation 12. Like the
paper, it leaves out what happens to the compressed tokens between the two. So it shows where information may come from,
and not how much arrives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Float, Int
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure

from brl_jax.fields import Natural, Rows
from brl_jax.layers import BRLConfig
from brl_jax.models import DecoderLM
from eval.harness.options import StudyOptions
from eval.harness.output import Measured, study
from eval.harness.pictures import panels
from eval.harness.runs import Run, first_rows, open_run
from eval.studies.locality import layer_weights, sown_maps
from train.engine.errors import UserError
from train.tasks.lm import LM
from train.tasks.recall import RECALL


@dataclasses.dataclass(frozen=True)
class RegularizerOptions(StudyOptions):
    """What to measure."""

    workdir: str = "runs/stdlib"  # type: ignore[assignment]
    """Folder of the run, of train.lm or train.recall, with BRL attention."""
    sequences: Rows = 4
    """Sequences to read, the first of the split."""
    length: Natural = 0
    """Tokens of a sequence to read, from its start; 0: all."""

    def __post_init__(self):
        super().__post_init__()
        if self.length == 1:
            raise ValueError("length must be at least 2, or 0 for all, got 1")


def reconstructed_score(
    propagated: Float[Array, "BC N t M"], compressed: Float[Array, "B C N M R"], *, block: int, length: int
) -> Float[Array, "B N T T"]:
    """The RRS of the module's text, from the weights by which the t tokens of each block read its compressed tokens and
    by which these read their histories. A decoder's block c reads the R tokens before c * block; what is before token 0
    is left out."""
    batch, blocks, _, _, history = compressed.shape
    propagated = rearrange(propagated, "(b c) n t m -> b c n t m", b=batch)
    scores = jnp.einsum("bcntm,bcnmr->bcntr", propagated, compressed)
    heads, size = scores.shape[2:4]
    whole = jnp.zeros((batch, heads, blocks * size, history + length), scores.dtype)
    for c in range(blocks):
        first = c * block
        fits = min(history, length + history - first)
        rows, columns = slice(c * size, (c + 1) * size), slice(first, first + fits)
        whole = whole.at[:, :, rows, columns].set(scores[:, c, :, :, :fits])
    return whole[:, :, :length, history:]


def require_brl(run: Run) -> None:
    """Raises UserError unless a layer of the run has BRL attention."""
    if not any(isinstance(m, BRLConfig) for m in run.config.model.mechanisms):
        raise UserError(f"--workdir: {run.config.loop.workdir} has no layer of BRL attention")


def layer_maps(model: DecoderLM, params: Any, tokens: Int[np.ndarray, "B T"]) -> dict[int, tuple[Any, Any]]:
    """The local attention and the RRS, (B, N, T, T) each, of every BRL layer that read anything."""

    @jax.jit
    def maps(params: Any, tokens: Array) -> dict[int, tuple[Array, Array]]:
        sown = sown_maps(model, params, tokens)
        named = [layer_weights(model.config, sown, name) for name in ("weights", "propagate", "compress")]
        return {
            layer: (
                named[0][layer][0],
                reconstructed_score(
                    named[1][layer][0],
                    compressed,
                    block=model.config.mechanisms[layer].block,  # type: ignore[attr-defined]
                    length=tokens.shape[1],
                ),
            )
            for layer, (compressed, *_) in named[2].items()
        }

    return maps(params, jnp.asarray(tokens))


def summary(local: Float[np.ndarray, "B N T T"], score: Float[np.ndarray, "B N T T"]) -> dict[str, float]:
    """The row sums of the module's text."""
    beyond = ~(local != 0).any((0, 1))
    absolute = np.abs(score)
    total = float(absolute.sum())
    return {
        "local": float(local.sum(-1).mean()),
        "row_sum": float(score.sum(-1).mean()),
        "row_sum_absolute": float(absolute.sum(-1).mean()),
        "beyond_window": float(absolute[..., beyond].sum()) / total if total else 0.0,
    }


def measure(options: RegularizerOptions) -> Iterator[Measured]:
    """The JSON object of the run, and the maps of its layers."""
    run = open_run([LM, RECALL], options.workdir, options.checkpoint)
    require_brl(run)
    tokens = first_rows(run, options.split, options.sequences)["tokens"]
    # With the memory "output" a network reads a block at a time.
    segments = [m.segment for m in run.config.model.mechanisms if m.segment is not None]
    tokens = tokens[:, : min([options.length or tokens.shape[1], *segments])]
    found = layer_maps(run.model, run.params, tokens)
    if not found:
        raise UserError(
            "--length: no compressed token reads anything within the rows; expected more than one block"
        )
    maps = {layer: tuple(map(np.asarray, both)) for layer, both in sorted(found.items())}
    result = {
        "workdir": options.workdir,
        "step": run.step,
        "length": tokens.shape[1],
        "sequences": len(tokens),
        "layers": [{"layer": layer, **summary(*both)} for layer, both in maps.items()],
    }
    yield Measured(result, maps)


def draw(measured: list[Measured]) -> Figure:
    """The local attention, the RRS and their sum in each layer, for the first sequence, averaged over heads."""
    maps = measured[0].example
    figure, axs = panels(len(maps), 3, (12, 3.8 * len(maps)), grid=None, sharex=True, sharey=True)
    norm = SymLogNorm(1e-3, vmin=-1, vmax=1)
    for row, (layer, (local, score)) in zip(axs, maps.items()):
        local, score = (x[0].mean(0) for x in (local, score))
        shown = {
            "local attention": local,
            "reconstructed regularizer score": score,
            "their sum": local + score,
        }
        for axes, (name, values) in zip(row, shown.items()):
            image = axes.imshow(values, cmap="RdBu_r", norm=norm, interpolation="nearest")
            axes.set_title(f"{name}, layer {layer + 1}", fontsize=10)
        row[0].set_ylabel("token i")
    for axes in axs[-1]:
        axes.set_xlabel("token j")
    figure.colorbar(image, ax=list(axs.ravel()), label="weight, linear below 0.001")
    return figure


main = study(
    RegularizerOptions(), "eval.regularizer", "Which tokens BRL's compressed tokens connect.", measure, draw
)
