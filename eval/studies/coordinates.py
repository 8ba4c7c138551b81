"""How activations grow with the width in the first steps of training: python -m eval.coordinates [OPTIONS].

The coordinate check of muP (Yang et al. 2022, arXiv:2203.03466, appendix D.1; docs/mup.md). Prints a JSON object for
each parametrisation: `change` (for each activation and width, a list over the steps of how far it has moved from its
first values, root mean square) and `slope` (for each activation, the power of the width that fits the last step).
"""

from __future__ import annotations

import argparse as sample
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from matplotlib.figure import Figure

from brl_jax.attention.core.checks import check_choice
from brl_jax.fields import Count, Length, Positive, Rows, Steps, Width
from brl_jax.layers import MECHANISMS
from brl_jax.models import DecoderConfig, DecoderLM
from eval.harness.options import OutputOptions
from eval.harness.output import study
from eval.harness.pictures import line_styles, panels, plain_log_axis, shared_legend
from train.engine.batch import Batch
from train.engine.errors import UserError
from train.engine.optimizer import OptimizerConfig, optimizer_of
from train.engine.step import init_state, make_train_step
from train.tasks.lm import lm_objective

# Modules whose outputs are recorded, by their names in the network.
_FOLLOWED = {"mixer": "mixer", "feed_forward": "feed-forward network"}
PARAMETRIZATIONS = ("standard", "muP")


@dataclasses.dataclass(frozen=True)
class WidthOptions(OutputOptions):
    """One decoder at several widths."""

    mechanism: str = "full"
    """A listed mechanism, with its default settings."""
    widths: tuple[Width, ...] = (64, 128, 256, 512)
    """Widths of the model in ascending order; the narrowest is muP's base."""
    num_heads: Width = 4
    """Number of heads; wider models have wider heads."""
    num_layers: Count = 2
    """Number of layers; a multiple of the mechanism's group."""
    steps: Steps = 6
    """Steps of AdamW."""
    batch: Rows = 4
    """Rows of a step."""
    length: Length = 64
    """Bytes of a row."""
    seeds: Count = 1
    """Number of networks to average over."""
    picture: str | None = None
    """A .png file to draw."""

    def __post_init__(self):
        check_choice("mechanism", self.mechanism, tuple(MECHANISMS))
        if len(self.widths) < 2 or list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"widths must be two or more, from the narrowest on, got {self.widths}")


@dataclasses.dataclass(frozen=True)
class CoordinateOptions(WidthOptions):
    """What to train."""

    learning_rate: Positive = 1e-2
    """AdamW's rate; large, so that activations move far in few steps."""


def text_batch(options: WidthOptions, step: int) -> Batch:
    """Bytes of a source file of Python's standard library and the byte after each."""
    text = np.frombuffer(Path(sample.__file__).read_bytes(), np.uint8)
    rows = (np.arange(options.batch) + step * options.batch)[:, None] * options.length
    window = text.take(rows + np.arange(options.length + 1), mode="wrap").astype(np.int32)
    return Batch({"tokens": window[:, :-1], "targets": window[:, 1:]}, reset=np.True_)


def make_model(options: WidthOptions, width: int, parametrization: str) -> DecoderLM:
    """The decoder of one width. Raises UserError if the mechanism does not support the width."""
    try:
        return DecoderLM(
            DecoderConfig(
                num_layers=options.num_layers,
                d_model=width,
                num_heads=options.num_heads,
                mechanism=MECHANISMS[options.mechanism](),
                mup_base_width=options.widths[0] if parametrization == "muP" else None,
            )
        )
    except ValueError as error:
        raise UserError(f"--widths: {width} will not do: {error}") from error


def activations(model: DecoderLM, params: Any, batch: Batch) -> dict[str, Float[Array, "..."]]:
    """The outputs of each layer's mixer and feed-forward network, (layers, B, T, D), and the logits (B, T, V)."""

    def followed(module: Any, method: str) -> bool:
        return method == "__call__" and module.name in _FOLLOWED

    (logits, _), state = model.apply(
        {"params": params}, batch["tokens"], capture_intermediates=followed, mutable=["intermediates"]
    )
    found: dict[str, list[Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state["intermediates"]):
        keys = [getattr(key, "key", getattr(key, "idx", None)) for key in path]
        at = keys.index("__call__")
        # The output is the first of the values that a mixer returns.
        if keys[at + 1 :] in ([0], [0, 0]) and keys[at - 1] in _FOLLOWED:
            found.setdefault(_FOLLOWED[str(keys[at - 1])], []).append(leaf)
    return {**{name: jnp.concatenate(leaves) for name, leaves in found.items()}, "logits": logits}


def changes(
    options: CoordinateOptions, width: int, parametrization: str, seed: int
) -> dict[str, list[float]]:
    """How far each of `activations` has moved from its first value after 1, 2, ... steps."""
    model = make_model(options, width, parametrization)
    objective = lm_objective(model)
    config = OptimizerConfig(
        learning_rate=options.learning_rate, warmup_steps=0, decay="constant", weight_decay=0.0
    )
    boxed = jax.eval_shape(objective.init, jax.random.key(0))
    optimizer, schedule = optimizer_of(config, options.steps, boxed, objective.rates(boxed))

    def fresh(key: Array) -> Any:
        params = nn.unbox(objective.init(key))
        return init_state(objective, params, optimizer, key=key, rows=options.batch, accumulation=1)

    state = jax.jit(fresh)(jax.random.key(seed))
    step = jax.jit(make_train_step(objective, optimizer, schedule, 1))
    look = jax.jit(functools.partial(activations, model))
    fixed = text_batch(options, 0)
    first = look(state.params, fixed)
    moved: dict[str, list[float]] = {name: [] for name in first}
    for i in range(options.steps):
        state, _ = step(state, text_batch(options, i))
        for name, now in look(state.params, fixed).items():
            moved[name].append(float(jnp.sqrt(jnp.mean(jnp.square(now - first[name])))))
    return moved


def measure(options: CoordinateOptions, parametrization: str) -> dict[str, Any]:
    """The changes at every width, averaged over seeds, and the power of the width that fits the last step."""
    by_width = []
    for width in options.widths:
        runs = [changes(options, width, parametrization, seed) for seed in range(options.seeds)]
        by_width.append({name: np.mean([run[name] for run in runs], axis=0) for name in runs[0]})
    names = list(by_width[0])
    last = {name: [float(moved[name][-1]) for moved in by_width] for name in names}
    logs = np.log(options.widths)
    return {
        "mechanism": options.mechanism,
        "parametrization": parametrization,
        "learning_rate": options.learning_rate,
        "widths": list(options.widths),
        "change": {name: [moved[name].tolist() for moved in by_width] for name in names},
        "slope": {name: float(np.polyfit(logs, np.log(values), 1)[0]) for name, values in last.items()},
    }


def draw(results: Sequence[dict[str, Any]]) -> Figure:
    """The change over the width, one curve for each step; a row of panels for each parametrisation."""
    names = list(results[0]["change"])
    size = (4.4 * len(names) + 1.6, 3.6 * len(results))
    figure, axs = panels(len(results), len(names), size, sharex=True, sharey="col")
    steps = len(results[0]["change"][names[0]][0])
    styles = line_styles([f"after step {i + 1}" for i in range(steps)])
    for row, result in zip(axs, results):
        for axes, name in zip(row, names):
            for i, (label, style) in enumerate(styles.items()):
                values = [moved[i] for moved in result["change"][name]]
                axes.plot(result["widths"], values, label=label, markersize=5, **style)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            plain_log_axis(axes.yaxis)
            axes.set_xticks(result["widths"], [str(width) for width in result["widths"]])
            axes.set_title(f"{result['parametrization']}: {name}, ~ width^{result['slope'][name]:.2f}")
        row[0].set_ylabel("change since the start, RMS")
    for axes in axs[-1]:
        axes.set_xlabel("width")
    shared_legend(figure, axs[0, 0])
    figure.suptitle(f"{results[0]['mechanism']}, AdamW at {results[0]['learning_rate']:g}")
    return figure


main = study(
    CoordinateOptions(),
    "eval.coordinates",
    "How activations grow with the width in the first steps, with muP and without.",
    lambda options: (measure(options, name) for name in PARAMETRIZATIONS),
    draw,
)
