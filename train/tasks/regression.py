"""The task of `python -m train.regression`: a decoder that learns linear functions from pairs in its prompt."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from brl_jax.layers import BilinearBTTConfig, BilinearMLRConfig, FullConfig, Mechanism
from brl_jax.models import Regressor, RegressorConfig
from train.data.in_context import HeldOutPrompts, InContextConfig, Prompt, least_squares_errors
from train.engine.batch import Arrays
from train.engine.config import LoopConfig
from train.engine.fields import Decided, Flat
from train.engine.optimizer import OptimizerConfig
from train.engine.step import Objective, outputs, weighted_sums
from train.tasks.drawn import DrawnTask
from train.tasks.run_config import RunConfig
from train.tasks.task import objective_of, shapes


@dataclasses.dataclass(frozen=True)
class RegressionModelConfig(RegressorConfig):
    """The network."""

    is_causal: Decided[bool] = True
    num_inputs: Decided[int] = 1
    num_outputs: Decided[int] = 1
    max_length: Decided[int] = 1024


@dataclasses.dataclass(frozen=True)
class RegressionConfig(RunConfig):
    """A decoder trained to predict linear functions from examples in its context."""

    data: Annotated[InContextConfig, Flat]
    model: Annotated[RegressionModelConfig, Flat]

    def without_effect(self) -> dict[str, str]:
        return super().without_effect() | {"z_loss": "with errors of numbers, which have no softmax"}


def _small(mechanism: Mechanism, num_heads: int) -> RegressionConfig:
    return RegressionConfig(
        loop=LoopConfig(steps=6_000, batch=64, eval_every=500, checkpoint_every=500, keep_checkpoints=1),
        data=InContextConfig(),
        model=RegressionModelConfig(
            num_layers=3, d_model=64, num_heads=num_heads, ffn="relu", mechanism=mechanism, mup_base_width=64
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=200, weight_decay=0.0, beta2=0.98),
    )


def _paper(mechanism: Mechanism, num_heads: int, inputs: int, width: int) -> RegressionConfig:
    """arXiv:2509.07963, figures 2, 3 and 8 to 12, with the settings of the authors' release (docs/presets.md). The
    curriculum ends after 6% of the steps. Heads keep their size under muP: scores are over the root of it."""
    return RegressionConfig(
        loop=LoopConfig(
            steps=500_001,
            batch=64,
            dispatch=100,
            eval_every=2_500,
            checkpoint_every=10_000,
            keep_checkpoints=1,
        ),
        data=InContextConfig(
            input_dim=inputs,
            pairs=2 * inputs,
            start_dims=4,
            start_pairs=8,
            curriculum_steps=30_000,
            valid_prompts=3_200,
        ),
        model=RegressionModelConfig(
            num_layers=6,
            d_model=width,
            num_heads=num_heads,
            ffn="gelu",
            positions="learned",
            mechanism=mechanism,
            mup_base_width=768,
            mup_base_heads=768 * num_heads // width,
        ),
        optimizer=OptimizerConfig(
            learning_rate=1e-3,
            warmup_steps=1_000,
            decay="constant",
            epsilon=1e-20,
            weight_decay=0.0,
            clip_norm=0.0,
        ),
    )


_SMALL: dict[str, tuple[Mechanism, int]] = {
    "full-8": (FullConfig(), 8),
    "full-1": (FullConfig(), 1),
    "btt-8": (BilinearBTTConfig(), 8),
    "mlr-8": (BilinearMLRConfig(), 8),
}


def _paper_mixers(width: int) -> dict[str, tuple[Mechanism, int]]:
    """Queries and keys are normalised everywhere. MLR has up to four levels of equal ranks, 8|8|8|8 at width 256 as in
    the release; norms over fewer than four features would leave little of them."""
    size = width // 8
    levels = min(4, size // 4)
    full = FullConfig(qk_norm=True)
    return {
        "full-8": (full, 8),
        "full-1": (full, 1),
        "btt-8": (BilinearBTTConfig(), 8),
        "mlr-8": (BilinearMLRConfig(ranks=(size // levels,) * levels), 8),
    }


PRESETS: dict[str, RegressionConfig] = {
    **{name: _small(*mixer) for name, mixer in _SMALL.items()},
    **{
        f"paper-{name}-{inputs}-{width}": _paper(*mixer, inputs, width)
        for width in (32, 64, 128, 256)
        for name, mixer in _paper_mixers(width).items()
        for inputs in (16, 32, 64, 128)
    },
}


def make_prompt(x: Float[Array, "B P D"], y: Float[Array, "B P"], kind: Prompt) -> Float[Array, "B T E"]:
    """(x_1, 0), (0, y_1), (x_2, 0), (0, y_2), ...: T = 2 P tokens of D + 1 numbers; "joined" has (x_i, y_i) for
    (0, y_i)."""
    batch, pairs, _ = x.shape
    questions = jnp.pad(x, ((0, 0), (0, 0), (0, 1)))
    answers = jnp.concatenate([x if kind == "joined" else jnp.zeros_like(x), y[..., None]], axis=-1)
    return jnp.stack([questions, answers], axis=2).reshape(batch, 2 * pairs, -1)


def squared_errors(
    model: Regressor, kind: Prompt, params: Any, batch: Arrays, key: Array | None
) -> Float[Array, "B P"]:
    """The squared error of each y, predicted at the token that holds its x alone.

    `batch` is {"x": (B, P, D), "y": (B, P)} floats.
    """
    predicted = outputs(model, params, key, make_prompt(batch["x"], batch["y"], kind))
    return jnp.square(predicted[:, ::2, 0] - batch["y"])


def regression_objective(model: Regressor, kind: Prompt) -> Objective:
    """The mean squared error over {"x": (B, P, D), "y": (B, P), "weights": (B, P)} floats."""

    def loss(params: Any, memory: Any, batch: Arrays, key: Array | None):
        return weighted_sums(squared_errors(model, kind, params, batch, key), batch["weights"], memory)

    return objective_of(model, [np.zeros((1, 2, model.config.num_inputs), np.float32)], loss)


class RegressionTask(DrawnTask[RegressionConfig]):
    """In-context linear regression."""

    name = "regression"
    about = "Trains a decoder on in-context linear regression."
    config_class = RegressionConfig
    presets = PRESETS
    default_preset = "btt-8"
    network = Regressor
    following = (
        "eval.regression --workdir {run}",
        "eval.regression --table {run} --picture {run}/regression.png",
    )
    held_out_rows = HeldOutPrompts

    def sized(self, config: RegressionConfig, data: None = None) -> RegressionConfig:
        """Sets the inputs and the length from the prompts."""
        sizes = {"num_inputs": config.data.input_dim + 1, "max_length": 2 * config.data.pairs}
        return config.changed(model=sizes)

    def objective(self, model: Regressor, config: RegressionConfig) -> Objective:
        return regression_objective(model, config.data.prompt)

    def batch_shapes(self, config: RegressionConfig, rows: int) -> dict[str, Any]:
        y = (rows, config.data.pairs)
        return shapes({}, {"y": y, "weights": y, "x": (*y, config.data.input_dim)})

    def describe_data(self, config: RegressionConfig, data: None) -> str:
        return f"drawn while training, {config.data.pairs} pairs of {config.data.input_dim} numbers and one"

    def measure(
        self, config: RegressionConfig, model: Regressor, params: Any, data: None, split: str
    ) -> dict[str, Any]:
        """The squared error by the number of pairs seen before, of the model and of least squares, and their means."""
        kind = config.data.prompt
        errors_of = jax.jit(lambda params, batch: squared_errors(model, kind, params, batch, None))
        errors, least = [], []
        for batch in self.held_out(config, data, split):
            exists = batch["weights"][:, 0] > 0
            errors.append(np.asarray(errors_of(params, {"x": batch["x"], "y": batch["y"]}))[exists])
            least.append(least_squares_errors(batch["x"][exists], batch["y"][exists]))
        ours, best = np.concatenate(errors), np.concatenate(least)
        by_prompt = ours.mean(axis=1)
        return {
            "error": float(ours.mean()),
            "standard_error": float(by_prompt.std(ddof=1) / np.sqrt(len(by_prompt)))
            if len(ours) > 1
            else None,
            "least_squares_error": float(best.mean()),
            "errors": ours.mean(axis=0).tolist(),
            "least_squares": best.mean(axis=0).tolist(),
            "prompts": len(ours),
        }


REGRESSION = RegressionTask()
