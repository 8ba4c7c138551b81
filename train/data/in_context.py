"""In-context linear regression (Garg et al. 2022, arXiv:2208.01066; arXiv:2509.07963, section 4): prompts of pairs
(x_i, y_i) of a linear function that is drawn for each prompt.

    w ~ N(0, I_d),   x_i ~ N(0, I_d),   y_i = w . x_i / sqrt(d)

A predictor that always answers 0 has squared error 1. After i pairs none is below max(0, 1 - i / d) on average, which
least squares of the least norm (the posterior mean of w) reaches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from brl_jax.fields import Checked, Count, Natural
from train.data.repeated import HeldOutBatches, RowNumbers, chosen_rows
from train.engine.batch import Batch
from train.engine.fields import Free

Prompt = Literal["alternate", "joined"]

# First numbers of the seeds, which keep the streams of random numbers apart; the training batches' is 0.
_, _HELD_OUT, _TEST = range(3)


@dataclasses.dataclass(frozen=True)
class InContextConfig(Checked):
    """The prompts."""

    input_dim: Count = 16
    """Size of an input x."""
    pairs: Count = 33
    """Pairs (x, y) of a prompt; the model predicts each y from the pairs before it."""
    prompt: Prompt = "alternate"
    """What follows x_i: y_i alone, as in both papers ("alternate"), or y_i together with x_i, so that no layer is
    needed to bring the two together ("joined")."""
    start_dims: Natural = 0
    """Numbers of x that are not zero at the first step, as in Garg et al.; 0: all, without a curriculum."""
    start_pairs: Natural = 0
    """Pairs of a prompt that the loss counts at the first step; 0: all."""
    curriculum_steps: Natural = 0
    """Steps in which both grow linearly to all."""
    valid_prompts: Count = 1024
    """Prompts of an evaluation while training."""
    test_prompts: Free[Count] = 4096
    """Prompts that eval.regression measures on."""

    cases = (None,)

    def __post_init__(self):
        for name, most in (("start_dims", self.input_dim), ("start_pairs", self.pairs)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be 0 to {most}, got {getattr(self, name)}")
        if (self.start_dims or self.start_pairs) and not self.curriculum_steps:
            raise ValueError("curriculum_steps must be at least 1 with start_dims or start_pairs, got 0")

    def without_effect(self) -> dict[str, str]:
        grows = self.start_dims or self.start_pairs
        return {} if grows else {"curriculum_steps": "without start_dims and start_pairs"}

    def sizes(self, step: int) -> tuple[int, int]:
        """The numbers of an x that are not zero at a step, and the pairs that the loss counts."""
        share = min(1.0, step / self.curriculum_steps) if self.curriculum_steps else 1.0

        def grown(first: int, last: int) -> int:
            first = first or last
            return first + int(share * (last - first))

        return grown(self.start_dims, self.input_dim), grown(self.start_pairs, self.pairs)

    def draw(self, _: None, seed: Sequence[int], rows: int) -> Mapping[str, Any]:
        """A training batch, of the step that the seed ends with; see `draw_prompts`."""
        return draw_prompts(self, seed, np.arange(rows), *self.sizes(seed[-1])).arrays


def draw_prompts(
    config: InContextConfig, seed: Sequence[int], rows: Int[np.ndarray, " R"], dims: int, pairs: int
) -> Batch:
    """{"y", "weights": (R, P), "x": (R, P, d)} float32 for some rows of the batch that `seed` identifies.

    The first `dims` numbers of each x are not zero, y has variance 1, and the first `pairs` pairs have weight 1, the
    others 0. A row does not depend on which others are drawn with it.
    """
    x = np.zeros((len(rows), config.pairs, config.input_dim), np.float32)
    y = np.zeros((len(rows), config.pairs), np.float32)
    for at, row in enumerate(rows.tolist()):
        numbers = np.random.default_rng([*seed, row]).standard_normal((config.pairs + 1, config.input_dim))
        inputs, function = numbers[1:, :dims], numbers[0, :dims]
        x[at, :, :dims] = inputs
        y[at] = inputs @ function / np.sqrt(dims)
    weights = np.broadcast_to((np.arange(config.pairs) < pairs).astype(np.float32), y.shape)
    return Batch({"y": y, "weights": np.ascontiguousarray(weights), "x": x})


class HeldOutPrompts(HeldOutBatches):
    """The same prompts in every pass of a split, with all dimensions and pairs; none is in a training batch. The last
    batch is padded with rows of weight 0."""

    def __init__(self, config: InContextConfig, *, batch: int, split: str = "valid", rows: RowNumbers = None):
        chosen = chosen_rows(batch, rows)
        count, seed = (
            (config.valid_prompts, (_HELD_OUT, 0)) if split == "valid" else (config.test_prompts, (_TEST, 0))
        )

        def make(step: int) -> Batch:
            # Numbered over all batches, so that the prompts do not depend on the size of a batch.
            numbers = step * batch + chosen
            drawn = draw_prompts(config, seed, numbers, config.input_dim, config.pairs)
            exists = (numbers < count).astype(np.float32)[:, None]
            return drawn.with_arrays(weights=drawn["weights"] * exists)

        super().__init__(make, -(-count // batch), batch)


def least_squares_errors(
    x: Float[np.ndarray, "R P d"], y: Float[np.ndarray, "R P"]
) -> Float[np.ndarray, "R P"]:
    """The squared error of each y by least squares (of the least norm) on the pairs before it, in float64."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    errors = np.square(y)
    for count in range(1, x.shape[1]):
        weights = np.linalg.pinv(x[:, :count]) @ y[:, :count, None]
        errors[:, count] = np.square(y[:, count] - (x[:, count, None] @ weights)[:, 0, 0])
    return errors


def one_step_errors(input_dim: int, pairs: int) -> Float[np.ndarray, " P"]:
    """The squared error of each y, on average over functions, by one step of gradient descent from zero on the pairs
    before it, at the best rate: (d + 1) / (d + 1 + i) after i pairs.

    With S the mean of x x' over the pairs, the step is c S w, and E |w - c S w|^2 / d = 1 - 2 c + c^2 (1 + (d + 1) / i)
    is least at c = i / (i + d + 1). One layer of linear attention can compute this (von Oswald et al.
    2023, arXiv:2212.07677, proposition 1), without finding which earlier x is like the new one.
    """
    return (input_dim + 1) / (input_dim + 1 + np.arange(pairs))
