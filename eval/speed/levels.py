"""What eval.speed can time: one row for each level. A new level is a module with `cases` and a row here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from brl_jax.layers import MECHANISMS
from eval.harness.options import check_names
from eval.speed import encoders, functions, layers, training
from eval.speed.measure import Case
from eval.speed.networks import network_names
from eval.speed.options import SpeedOptions


class Level(NamedTuple):
    """One kind of things to time.

    Attributes:
      cases: the cases of the options at one length.
      names: what --mechanisms may name.
      title: of its tables, with the fields and properties of the options.
      has_torch: whether PyTorch has a row, which the others are then compared with.
    """

    cases: Callable[[SpeedOptions, int], list[Case]]
    names: tuple[str, ...]
    title: str
    has_torch: bool = False


LEVELS = {
    "functions": Level(
        functions.cases, tuple(functions.CASES), "causal attention functions, window {0.window}", True
    ),
    "layers": Level(layers.cases, tuple(MECHANISMS), "one transformer layer of width {0.width}"),
    "encoders": Level(
        encoders.cases, encoders.NAMES, f"encoders of {encoders.NUM_LAYERS} layers of width {{0.width}}", True
    ),
    "classifiers": Level(
        training.classifiers, network_names(), "classifiers of width {0.width}, inference and training"
    ),
    "encoder_decoders": Level(
        training.encoder_decoders, training.ENCODER_DECODERS, "encoder-decoders of width {0.width}, training"
    ),
    "decoders": Level(
        training.decoders, training.DECODERS, "decoders of width {0.width}, inference and training"
    ),
}


@dataclasses.dataclass(frozen=True)
class CheckedOptions(SpeedOptions):
    """The options of the command, which may name only what there is to time."""

    def __post_init__(self):
        super().__post_init__()
        known = tuple(dict.fromkeys(name for level in LEVELS.values() for name in level.names))
        check_names(self, levels=LEVELS, mechanisms=known, references=functions.REFERENCES)
        if not self.levels:
            raise ValueError(f"levels must be some of {', '.join(LEVELS)}, got none")
        first = LEVELS[self.levels[0]]
        if len(self.levels) == 1 and not any(map(self.wants, first.names)):
            raise ValueError(
                f"mechanisms of the level {self.levels[0]} must be out of {', '.join(first.names)}, "
                f"got {', '.join(self.mechanisms)}"
            )


def base_name(level: str, options: SpeedOptions) -> str:
    """The row that the others of its level and length are compared with."""
    return functions.TORCH if LEVELS[level].has_torch and functions.has_torch(options) else "full"
