"""Imports point down in the drawing of docs/house.md, never up."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What no module of a folder imports.
ABOVE = {
    "pallas_kernels": ("brl_jax", "train", "eval"),
    "brl_jax/attention": ("brl_jax.layers", "brl_jax.models", "train", "eval"),
    "brl_jax/layers": ("brl_jax.models", "train", "eval"),
    "brl_jax": ("train", "eval"),
    "train/engine": ("brl_jax.layers", "brl_jax.models", "train.tasks", "train.data", "train.cli"),
    "train/data": ("brl_jax.layers", "brl_jax.models", "train.tasks", "train.cli"),
    "train/tasks": ("train.cli",),
    "train": ("eval",),
}  # fmt: skip


def _imported(path):
    """The modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", ABOVE)
def test_no_module_imports_from_above(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        up = [n for n in _imported(path) for above in ABOVE[folder] if f"{n}.".startswith(f"{above}.")]
        assert not up, f"{path.relative_to(ROOT)} imports {', '.join(up)}"
