"""What the mechanisms' configurations refuse, for every field of every mechanism."""

import dataclasses
import types
import typing
from typing import Any, Literal

import pytest

from brl_jax.layers import MECHANISMS

FIELDS = [
    (name, field.name, typing.get_type_hints(kind)[field.name])
    for name, kind in MECHANISMS.items()
    for field in dataclasses.fields(kind)
]


def members(hint: Any) -> set[Any]:
    """The kinds of value that a field may have, Literals as `Literal`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*(members(part) for part in typing.get_args(hint)))
    return {Literal} if typing.get_origin(hint) is Literal else {hint}


def fields_of(kind: Any) -> list[tuple[str, str]]:
    return [(name, field) for name, field, hint in FIELDS if kind in members(hint)]


@pytest.mark.parametrize(("name", "field"), fields_of(Literal))
def test_an_unknown_word_is_refused(name, field):
    with pytest.raises(ValueError, match=f"^{field} must be .*, got 'x'$"):
        MECHANISMS[name](**{field: "x"})


def test_a_misspelt_word_has_a_suggestion():
    with pytest.raises(ValueError, match=r"formulation must be .*; did you mean 'equations'\?"):
        MECHANISMS["brl"](formulation="equation")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("name", "field"), fields_of(float))
def test_a_number_that_is_not_finite_is_refused(name, field, number):
    with pytest.raises(ValueError, match=f"^{field} must be .*, got {number}$"):
        MECHANISMS[name](**{field: number})


@pytest.mark.parametrize(("name", "field"), [pair for pair in fields_of(int) if pair[1] != "seed"])
def test_a_negative_size_is_refused(name, field):
    with pytest.raises(ValueError, match=f"^{field} must be .*, got -1$"):
        MECHANISMS[name](**{field: -1})


def test_the_fields_are_found():
    """Otherwise the tests above would test nothing."""
    assert ("brl", "phi") in fields_of(Literal)
    assert ("tlinformer", "context") in fields_of(Literal)
    assert ("brl", "gamma") in fields_of(float)
    assert ("linformer", "num_projected") in fields_of(int)
