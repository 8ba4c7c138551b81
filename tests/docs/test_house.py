"""Imports point down in the drawing of docs/house.md, never up, and never in a circle between folders."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pallas_kernels", "brl_jax", "train", "eval")
#: What no module of a folder reaches.
ABOVE = {
    "pallas_kernels": ("brl_jax", "train", "eval"),
    "brl_jax/attention": ("brl_jax.layers", "brl_jax.models", "train", "eval"),
    "brl_jax/layers": ("brl_jax.models", "train", "eval"),
    "brl_jax": ("train", "eval"),
    "train/engine": ("brl_jax.layers", "brl_jax.models", "train.tasks", "train.data", "train.cli"),
    "train/data": ("brl_jax.layers", "brl_jax.models", "train.tasks", "train.cli"),
    "train/tasks": ("train.cli",),
    "train": ("eval",),
    "eval/harness": ("eval.tasks", "eval.speed", "eval.chips", "eval.studies"),
    "eval/tasks": ("eval.speed", "eval.chips", "eval.studies"),
    "eval/speed": ("eval.tasks", "eval.chips", "eval.studies"),
    "eval/chips": ("eval.tasks", "eval.speed", "eval.studies"),
}  # fmt: skip


def _module(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_module(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def _within(module, folder):
    return f"{module}.".startswith(f"{folder}.")


def _statements(node, inside_functions):
    """The imports under a node, those for type checkers left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        elif inside_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _statements(child, inside_functions)


@functools.cache
def _imported(module, inside_functions):
    """The modules of the repository that a module imports."""
    names = set()
    for node in _statements(ast.parse(FILES[module].read_text()), inside_functions):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return sorted(names & set(FILES))


@pytest.mark.parametrize("folder", ABOVE)
def test_no_module_reaches_above(folder):
    """By what it imports anywhere, and by what those modules import when they are loaded."""
    own = [module for module in FILES if _within(module, folder.replace("/", "."))]
    assert own
    ways = {module: module for module in own}
    waiting = list(own)
    for module in waiting:
        for name in _imported(module, inside_functions=module in own):
            parts = name.split(".")
            for loaded in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
                if loaded not in ways:
                    ways[loaded] = f"{ways[module]} > {loaded}"
                    waiting.append(loaded)
    up = [way for name, way in ways.items() for above in ABOVE[folder] if _within(name, above)]
    assert not up, up[0]


def _folder(module):
    return module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_import_in_one_direction(package):
    """The package's own root is left out, because it has what people import, which needs every room, and also what
    every room needs. So is what an __init__ gathers from its own folder."""
    below = {}
    for module, path in FILES.items():
        for name in _imported(module, inside_functions=True):
            start, end = _folder(module), _folder(name)
            gathers = path.name == "__init__.py" and _within(name, module)
            if _within(start, package) and package not in (start, end) and start != end and not gathers:
                below.setdefault(start, set()).add(end)
    graphlib.TopologicalSorter(below).prepare()  # raises CycleError, with the folders of a circle
