"""help() of every public attention function begins with a screen of summary, shapes and example."""

import ast
import functools
import inspect
import itertools
import pydoc
import re
import textwrap

import jax
import jax.numpy as jnp
import pytest

import brl_jax

SCREEN = 40
LINES = 50
# What several functions take by keyword.
ORDER = (
    "scale", "score", "is_causal", "query_seq_lengths", "key_value_seq_lengths", "segment_ids", "positions",
    "rope_theta", "state", "return_state", "count", "implementation",
)  # fmt: skip
# Sizes for which every example is valid, and the exceptions of some functions.
SIZES = dict(
    zip("BTSNKJHVDMRFLCPbacet", (2, 256, 256, 4, 2, 2, 64, 64, 64, 8, 4, 16, 256, 4, 256, 8, 8, 8, 8, 2))
)
OWN_SIZES = {
    "compression_blocks": {"C": 15, "L": 32},
    "native_sparse_attention": {"C": 15},
}
# Further names that examples use; the line above an example gives the shapes of its first arguments.
NAMES = {
    "key_projection": (4, 256),
    "value_projection": (4, 256),
    "right": (8, 8, 4, 8, 2),
    "left": (4, 8, 8, 8, 2),
}
NUMBERS = {
    "batch": 2,
    "length": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "rank": 4,
    "window": 128,
}


def _is_attention(function):
    if not inspect.isfunction(function) or not function.__module__.startswith("brl_jax.attention"):
        return False
    first = next(iter(inspect.signature(function).parameters))
    return first in ("query", "value", "x") and not function.__name__.startswith("init_")


FUNCTIONS = {
    name: getattr(brl_jax, name) for name in brl_jax.__all__ if _is_attention(getattr(brl_jax, name))
}


def _arguments(name):
    return inspect.signature(FUNCTIONS[name]).parameters


def _example(function):
    """The shapes before and after the arrow, and the lines of the example."""
    text = inspect.getdoc(function)
    found = re.search(r"^(\(.*) -> (\([^)]*\)).*::\n\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    assert found, text
    return found[1], found[2], textwrap.dedent(found[3])


def _shapes(text, sizes):
    for letters, times in re.findall(r"\(([^)]*)\)(?: x (\d))?", text):
        shape = tuple(sizes[letter] if letter in sizes else int(letter) for letter in letters.split(", "))
        yield from itertools.repeat(shape, int(times or 1))


def test_keywords_have_one_order():
    for name, function in FUNCTIONS.items():
        keywords = [
            x.name for x in inspect.signature(function).parameters.values() if x.kind == x.KEYWORD_ONLY
        ]
        found = [keyword for keyword in keywords if keyword in ORDER]
        assert found == sorted(found, key=ORDER.index), name


def test_the_whole_help_is_short():
    for name, function in FUNCTIONS.items():
        assert len(inspect.getdoc(function).splitlines()) <= LINES, name


def test_the_first_screen():
    assert len(FUNCTIONS) >= 35
    for name, function in FUNCTIONS.items():
        screen = pydoc.plain(pydoc.render_doc(function)).splitlines()[:SCREEN]
        shapes = [number for number, line in enumerate(screen) if re.match(r"    \(.* -> \(.*::$", line)]
        assert shapes, f"{name}: no line of shapes"
        assert screen[3].strip(), f"{name}: no summary"
        assert 3 < shapes[0] < 10, f"{name}: shapes come late"
        assert f"{name}(" in "\n".join(screen[shapes[0] :]), f"{name}: no example"


def _scope(name, before):
    """What an example may use, with shapes as `before` says."""
    sizes = SIZES | OWN_SIZES.get(name, {})
    given = dict(zip(inspect.signature(FUNCTIONS[name]).parameters, _shapes(before, sizes)))
    weights = [(1, 64, 4, 8), (8, 8, 4, 8)]
    return {
        **{key: getattr(brl_jax, key) for key in brl_jax.__all__},
        **{key: jnp.ones(shape, jnp.float32) for key, shape in (NAMES | given).items()},
        **NUMBERS,
        "jax": jax,
        "query_weights": [jnp.ones(shape) for shape in weights],
        "key_weights": [jnp.ones((*shape[:2], 2, shape[3])) for shape in weights],
    }


def test_examples_use_the_names_of_their_arguments():
    for name, function in FUNCTIONS.items():
        before, _, example = _example(function)
        names = [node for node in ast.walk(ast.parse(example)) if isinstance(node, ast.Name)]
        made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        assert {node.id for node in names} <= made | set(_scope(name, before)), name


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "implementation" in _arguments(name)])
def test_the_help_says_where_xla_is_the_only_implementation(name):
    before, _, example = _example(FUNCTIONS[name])
    scope = _scope(name, before) | {name: functools.partial(FUNCTIONS[name], implementation="another")}
    with pytest.raises(ValueError, match="implementation must be") as refused:
        jax.eval_shape(functools.partial(exec, example, scope))
    only = "must be None or 'xla', got" in str(refused.value)
    assert ('implementation: None or "xla"' in inspect.getdoc(FUNCTIONS[name])) == only


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_runs_and_has_the_shape_it_says(name):
    before, after, example = _example(FUNCTIONS[name])

    def run():
        scope = _scope(name, before)
        exec(example, scope)
        return scope["out"]

    assert jax.eval_shape(run).shape == next(_shapes(after, SIZES | OWN_SIZES.get(name, {})))
