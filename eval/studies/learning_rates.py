"""Which learning rate is best at which width: python -m eval.learning_rates [OPTIONS] (docs/mup.md).

Prints a JSON object for each parametrisation: `loss`, for each width a list over the rates of the mean loss of the last
tenth of the steps (null where it is not finite), averaged over seeds, and `best`, the best rate of each width.
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
import optax
from jaxtyping import Array, Float
from matplotlib.figure import Figure

from brl_jax.fields import Positive, Steps, Width
from eval.harness.output import study
from eval.harness.pictures import legend_outside, line_styles, panels
from eval.studies.coordinates import PARAMETRIZATIONS, WidthOptions, make_model, text_batch
from train.engine.optimizer import OptimizerConfig, optimizer_of
from train.tasks.lm import lm_objective


@dataclasses.dataclass(frozen=True)
class RateOptions(WidthOptions):
    """What to train."""

    widths: tuple[Width, ...] = (64, 128, 256)
    """Widths of the model in ascending order; the narrowest is muP's base."""
    rates: tuple[Positive, ...] = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
    """Peak learning rates of the runs."""
    steps: Steps = 100
    """Steps of AdamW; the rate rises for a tenth of them, then decays as a cosine."""

    def __post_init__(self):
        super().__post_init__()
        if not self.rates:
            raise ValueError("rates must be one or more, got none")


def losses(options: RateOptions, width: int, parametrization: str, seed: int) -> Float[np.ndarray, "R S"]:
    """The training loss of every step at every rate; all rates are trained in one program."""
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=max(1, options.steps // 10), weight_decay=0.0)
    objective = lm_objective(make_model(options, width, parametrization))
    boxed = jax.eval_shape(objective.init, jax.random.key(0))
    optimizer, _ = optimizer_of(config, options.steps, boxed, objective.rates(boxed))

    def loss(params: Any, batch: Any) -> Array:
        total, weight, _ = objective.loss(params, objective.init_memory(options.batch), batch, None)
        return total / weight

    def one(rate: Array, params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        updates = jax.tree.map(lambda update: rate * update, updates)
        return optax.apply_updates(params, updates), state, value

    rates = jnp.asarray(options.rates, jnp.float32)
    step = jax.jit(jax.vmap(one, in_axes=(0, 0, 0, None)))
    params = jax.jit(lambda key: nn.unbox(objective.init(key)))(jax.random.key(seed))
    params = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(rates), *leaf.shape)), params)
    state = jax.vmap(optimizer.init)(params)
    read = []
    for i in range(options.steps):
        params, state, value = step(rates, params, state, text_batch(options, i).arrays)
        read.append(value)
    return np.stack(read, axis=1)


def measure(options: RateOptions, parametrization: str) -> dict[str, Any]:
    """The mean loss at the end, by width and rate."""
    last = max(1, options.steps // 10)
    rows = []
    for width in options.widths:
        found = [losses(options, width, parametrization, seed) for seed in range(options.seeds)]
        rows.append(np.mean([each[:, -last:].mean(1) for each in found], axis=0))
    table = np.array(rows)
    finite = np.where(np.isfinite(table), table, np.inf)
    return {
        "mechanism": options.mechanism,
        "parametrization": parametrization,
        "widths": list(options.widths),
        "rates": list(options.rates),
        "loss": [[float(value) if math.isfinite(value) else None for value in row] for row in finite],
        "best": [options.rates[int(np.argmin(row))] if np.isfinite(row).any() else None for row in finite],
    }


def draw(results: Sequence[dict[str, Any]]) -> Figure:
    """The loss over the rate, one curve for each width and one panel for each parametrisation."""
    figure, [axs] = panels(1, len(results), (5.2 * len(results) + 1.6, 4.4), sharey=True)
    styles = line_styles([f"width {width}" for width in results[0]["widths"]])
    for axes, result in zip(axs, results):
        for (label, style), row, best in zip(styles.items(), result["loss"], result["best"]):
            values = [math.nan if value is None else value for value in row]
            axes.plot(result["rates"], values, label=label, markersize=5, **style)
            if best is None:
                continue
            at = result["rates"].index(best)
            axes.plot(best, values[at], marker="o", markersize=12, fillstyle="none", color=style["color"])
        axes.set_xscale("log", base=2)
        axes.set_xticks(result["rates"], [f"{rate:g}" for rate in result["rates"]])
        axes.set(xlabel="learning rate", title=result["parametrization"])
    axs[0].set_ylabel("training loss at the end, nats a byte")
    legend_outside(axs[-1])
    figure.suptitle(f"{results[0]['mechanism']}; rings: the best rate of a width")
    return figure


main = study(
    RateOptions(),
    "eval.learning_rates",
    "Which learning rate is best at which width, with muP and without.",
    lambda options: (measure(options, name) for name in PARAMETRIZATIONS),
    draw,
)
