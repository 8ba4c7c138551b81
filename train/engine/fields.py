"""Marks on the fields of configurations, as part of their types.

steps: Free[int] = 1000              a resumed run may have another value
vocab_size: Decided[int] = 256       the task or its data set it; there is no such option
pretrained: Needed[str] = ""         required, so that the examples of --help name it
model: Annotated[ModelConfig, Flat]  its fields are options without a prefix (--d_model, not --model.d_model)
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import typing
from typing import Annotated, Any, TypeVar

import tyro

from brl_jax.fields import part_of

T = TypeVar("T")


class Mark(enum.Enum):
    """The marks."""

    FREE = "a resumed run may change it"
    DECIDED = "the task or its data set it"
    NEEDED = "it is required"


Free = Annotated[T, Mark.FREE]
Decided = Annotated[T, Mark.DECIDED, tyro.conf.Fixed, tyro.conf.Suppress]
Needed = Annotated[T, Mark.NEEDED]
Flat = tyro.conf.arg(name="")


def marked(kind: type, mark: Mark) -> tuple[str, ...]:
    """The dotted names of the fields with a mark, in a dataclass and its parts; a marked part counts for all of its
    fields."""
    return _marked(kind, mark)  # type: ignore[arg-type]


@functools.cache  # because reading annotations takes milliseconds, and a command line asks for every option
def _marked(kind: Any, mark: Mark) -> tuple[str, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    plain = typing.get_type_hints(kind)
    names: list[str] = []
    for field in dataclasses.fields(kind):
        part = part_of(plain[field.name])
        if mark in getattr(hints[field.name], "__metadata__", ()):
            names.append(field.name)
        elif part is not None:
            names += [f"{field.name}.{name}" for name in marked(part, mark)]
    return tuple(names)
