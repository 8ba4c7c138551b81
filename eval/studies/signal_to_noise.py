"""How well BRL's compressed tokens tell records from noise: python -m eval.signal_to_noise --workdir DIR [DIR ...].

The attention signal-to-noise ratio of BRL-Attention (OpenReview Vpyg3fqXbl, equations 16 to 18), on trained runs of
`train.recall`, whose rows say which tokens matter. For a compressed token of one head with the weights S,

    r = mean of S over the relevant keys / mean of S over the irrelevant keys     (16)

is computed for S = S1, the plain softmax (17, "first"), and for S = S1 - gamma S2, the differential form (18,
"differential", where its denominator is positive). The latter may be negative, and then r is not a ratio of signal to
noise; "absolute" takes |S1 - gamma S2|. Proposition D.2 asserts that (18) is at least (17) wherever delta_1 - delta_2
<= delta, for every positive gamma; the condition says that r of S2 <= r of S1.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure

from brl_jax.fields import Rows
from eval.harness.options import StudyOptions
from eval.harness.output import Measured, each_run, study
from eval.harness.pictures import panels
from eval.harness.runs import open_run, run_names
from eval.studies.locality import layer_weights, sown_maps
from eval.studies.regularizer import require_brl
from train.data.drawn import HeldOutDrawn
from train.data.recall import Kind
from train.engine.errors import UserError
from train.tasks.recall import RECALL


@dataclasses.dataclass(frozen=True)
class SignalToNoiseOptions(StudyOptions):
    """What to measure."""

    workdir: tuple[str, ...] = ("runs/recall/brl",)
    """Folders of the runs, of train.recall, with BRL attention."""
    sequences: Rows = 64
    """Rows to read, the first of the split with the most records."""


def relevant_tokens(
    kind: Kind,
    tokens: Int[np.ndarray, "B T"],
    places: Int[np.ndarray, "B P"],
    targets: Int[np.ndarray, "B P"],
) -> Bool[np.ndarray, "B T"]:
    """Which tokens belong to a record that is asked for: the key that the question names, and the answer that follows.
    Rows of "copy" have no questions; there the symbols are relevant."""
    asked = np.take_along_axis(tokens, places, axis=1)
    first = places.min(axis=1)[:, None]
    if kind == "copy":
        return (tokens[..., None] == targets[:, None]).any(-1) & (np.arange(tokens.shape[1]) < first)
    here, following = tokens[:, :-1, None], tokens[:, 1:, None]
    starts = ((here == asked[:, None]) & (following == targets[:, None])).any(-1)
    starts &= np.arange(tokens.shape[1] - 1) < first
    relevant = np.zeros(tokens.shape, bool)
    relevant[:, :-1] |= starts
    relevant[:, 1:] |= starts
    return relevant


def history_mask(values: Any, *, blocks: int, block: int, history: int) -> np.ndarray:
    """(B, C, history): the values (B, T) within the history of each block, False before token 0."""
    padded = np.pad(values, ((0, 0), (history, blocks * block)))
    return np.stack([padded[:, c * block : c * block + history] for c in range(blocks)], axis=1)


def ratios(
    weights: Float[np.ndarray, "B C N M R"], relevant: np.ndarray, irrelevant: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Numerators and denominators of equation 16, (B, C, N, M) each, for keys marked (B, C, R)."""

    def mean(marked: np.ndarray) -> np.ndarray:
        count = np.maximum(marked.sum(-1), 1.0)[:, :, None, None]
        return np.einsum("bcnmr,bcr->bcnm", weights, marked.astype(np.float64)) / count

    return mean(relevant), mean(irrelevant)


def compare(
    first: Float[np.ndarray, "B C N M R"],
    signed: Float[np.ndarray, "B C N M R"],
    relevant: Bool[np.ndarray, "B C R"],
    irrelevant: Bool[np.ndarray, "B C R"],
) -> tuple[dict[str, Any], Float[np.ndarray, " K"]]:
    """The measures of the module's text, and the defined values of (18) over (17).

    Args:
      first, signed: S1 and S1 - gamma S2.
      relevant, irrelevant: the keys of each block's history. Blocks without one of the two are left out.
    """
    first, signed = (x.astype(np.float64) for x in (first, signed))
    present = np.asarray(relevant.any(-1) & irrelevant.any(-1))[:, :, None, None]
    contrast = first - signed  # gamma S2, whose rows sum to gamma
    gamma = contrast.sum(-1)
    chosen = np.broadcast_to(present, gamma.shape)

    def of(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        up, down = ratios(weights, relevant, irrelevant)
        return up[chosen], down[chosen]

    (up, down), (up1, down1), (up2, down2) = of(signed), of(first), of(contrast)
    absolute = np.divide(*of(np.abs(signed)))
    plain, g = up1 / down1, gamma[chosen]
    defined = down > 0
    ratio = np.divide(up, down, out=np.zeros_like(up), where=defined)
    # gamma cancels in the ratio of S2, with its sign.
    condition = (g > 0) & (up2 * down1 <= up1 * down2)
    raised = defined & (ratio > plain)
    reached = defined & (ratio >= plain)
    measures = {
        "first": float(np.median(plain)),
        "first_90": float(np.quantile(plain, 0.9)),
        "differential": float(np.median(ratio[defined])) if defined.any() else None,
        "differential_90": float(np.quantile(ratio[defined], 0.9)) if defined.any() else None,
        "absolute": float(np.median(absolute)),
        "undefined": float(1 - defined.mean()),
        "raised": float(raised.mean()),
        "condition": float(condition.mean()),
        "proposition": float(reached[condition].mean()) if condition.any() else None,
        "gamma": [float(g.min()), float(g.max())],
        "weights": int(chosen.sum()),
    }
    return measures, ratio[defined] / plain[defined]


def measure_run(options: SignalToNoiseOptions, workdir: str) -> Measured:
    """The JSON object of one run, and for the picture the name, the ratios and the measures of each layer."""
    run = open_run([RECALL], workdir, options.checkpoint)
    require_brl(run)
    # The rows with the most records.
    case = max(run.config.data.cases, key=lambda case: case.pairs)
    held_out = HeldOutDrawn(run.config.data, split=options.split, cases=[case], batch=options.sequences)
    rows = {name: np.asarray(array) for name, array in next(iter(held_out)).arrays.items()}
    # Rows without weight fill a batch that is larger than the split.
    real = rows["weights"].any(axis=1)
    rows = {name: array[real] for name, array in rows.items()}
    relevant = relevant_tokens(run.config.data.kind, rows["tokens"], rows["places"], rows["targets"])
    maps = jax.jit(functools.partial(sown_maps, run.model))(run.params, jnp.asarray(rows["tokens"]))
    signed, first = (
        {layer: np.asarray(x) for layer, (x, *_) in layer_weights(run.config.model, maps, name).items()}
        for name in ("compress", "compress_first")
    )
    layers, kept = [], []
    for layer, weights in sorted(signed.items()):
        m = run.config.model.mechanisms[layer]
        if m.gamma == 0.0:
            continue
        sizes = {"blocks": weights.shape[1], "block": m.block, "history": weights.shape[-1]}
        marks = [history_mask(x, **sizes) for x in (relevant, ~relevant)]
        if not (marks[0].any(-1) & marks[1].any(-1)).any():
            raise UserError(
                f"--workdir: {workdir}: no history of a block in layer {layer + 1} has both a record and other tokens"
            )
        measures, change = compare(first[layer], weights, *marks)
        layers.append({"layer": layer, **measures})
        kept.append((f"{run_names(options.workdir)[workdir]}, layer {layer + 1}", change, measures))
    if not layers:
        raise UserError(f"--workdir: {workdir} has no differential compression of more than one block")
    result = {
        "workdir": workdir,
        "step": run.step,
        "sequences": len(rows["tokens"]),
        "relevant": float(relevant.mean()),
        "layers": layers,
    }
    return Measured(result, kept)


def draw(measured: list[Measured]) -> Figure:
    """How the differential form changes the ratio: a histogram of (18) over (17) for each run and layer."""
    shown = [layer for each in measured for layer in each.example]
    figure, axs = panels(len(shown), 1, (9, 2.4 * len(shown) + 0.6), grid=None, sharex=True)
    for axes, (name, change, measures) in zip(axs[:, 0], shown):
        axes.hist(np.log2(np.clip(change, 2.0**-8, 2.0**8)), bins=np.linspace(-8, 8, 81), color="#0072B2")
        axes.axvline(0, color="#999999", linestyle=":")
        title = f"{name}: {measures['undefined']:.0%} undefined, {measures['raised']:.0%} of all raised"
        axes.set_title(title, fontsize=10)
        axes.set_ylabel("weights")
    axs[-1, 0].set_xlabel(
        "log2 of the ratio with difference (18) over the ratio without (17); the first and last bars include all beyond"
    )
    return figure


main = study(
    SignalToNoiseOptions(),
    "eval.signal_to_noise",
    "How well BRL's compressed tokens tell records from noise.",
    each_run(measure_run),
    draw,
)
