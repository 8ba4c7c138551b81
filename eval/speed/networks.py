"""Networks that differ only in their mechanism: one for each mechanism that has a bidirectional form."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, TypeVar, get_args

from brl_jax.layers import MECHANISMS, LocalConfig, Mechanism
from brl_jax.models import StackConfig
from brl_jax.models.transnormer import Variant, transnormer

M = TypeVar("M", bound=StackConfig)

CONTROL = "no_mixing"
"""The network in which no token sees another; what the others do better is what a task needs attention for."""

_TRANSNORMERS: dict[str, Variant] = {f"transnormer_{variant}": variant for variant in get_args(Variant)}
# Fields of some mechanisms that count the tokens a query sees, or the tokens that summarise all of them.
_OF_SIZE = (
    "window",
    "block_size",
    "num_compressed",
    "num_landmarks",
    "num_projected",
    "num_samples",
    "num_packed",
)
# Fields that follow the length of the sequences.
_OF_LENGTH = ("max_length", "context")


class Network(NamedTuple):
    """The mechanism of all layers, or of the early layers if the late ones have another."""

    mechanism: Mechanism
    late_mechanism: Mechanism | None = None

    @property
    def linear_cost(self) -> bool:
        """Whether time and memory grow linearly with the length."""
        used = (self.mechanism, self.late_mechanism)
        return all(mechanism.linear_cost for mechanism in used if mechanism is not None)

    def within(self, model: M) -> M:
        """A model with these mechanisms; its number of layers is rounded up to whole groups."""
        group = self.mechanism.group
        layers = -(-model.num_layers // group) * group
        return dataclasses.replace(
            model, mechanism=self.mechanism, late_mechanism=self.late_mechanism, num_layers=layers
        )


def network_names() -> tuple[str, ...]:
    """The names of `networks`: the listed mechanisms that have a bidirectional form, TransNormer's two variants, and
    the control."""
    listed = (name for name, kind in MECHANISMS.items() if kind().bidirectional)
    return (*listed, *_TRANSNORMERS, CONTROL)


def network(name: str, *, length: int, size: int | None = None) -> Network:
    """The network of this name for sequences of `length` tokens.

    A mechanism has its default configuration, except for fields that follow the length and, with a `size`, for fields
    that count tokens, such as the width of a window or the number of compressed tokens.
    """
    if name == CONTROL:
        return Network(LocalConfig(window=1))
    if name in _TRANSNORMERS:
        model = transnormer(_TRANSNORMERS[name], StackConfig)
        assert model.late_mechanism is not None
        return Network(*(_fit(m, length, size) for m in (model.mechanism, model.late_mechanism)))
    return Network(_fit(MECHANISMS[name](), length, size))


def _fit(mechanism: Mechanism, length: int, size: int | None) -> Mechanism:
    named = {f.name for f in dataclasses.fields(mechanism)}
    changes = {name: length for name in _OF_LENGTH if name in named}
    # A field without a default number follows its own rule.
    fields = {name for name in named if type(getattr(mechanism, name)) is int}
    if size is not None:
        changes |= {name: size for name in _OF_SIZE if name in fields}
    return dataclasses.replace(mechanism, **changes)
