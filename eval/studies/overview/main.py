"""Writes the table of all mechanisms and README's picture from what was measured: python -m eval.overview.

What a mechanism can do comes from `brl_jax.MECHANISMS`, and its figures from the pages that they were published on, so
that no number is kept twice. What launches kernels on a TPU and an NVIDIA GPU is in docs/data/kernels.json;
--lower finds it out again (the extra gpu; minutes).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from etils import epath

from brl_jax.fields import Checked
from brl_jax.layers import MECHANISMS
from brl_jax.models.stack import Stack
from eval.harness.options import command
from eval.harness.pictures import save
from eval.speed.layers import default_config
from eval.speed.options import SpeedOptions
from eval.studies.overview import pages
from eval.studies.overview.picture import draw
from eval.studies.overview.table import full_table, short_table, with_links
from train.engine.errors import UserError
from train.engine.storage import write_whole

_LENGTH = 2048
#: What a program of a platform contains where a kernel is launched, and who made the kernel.
_CALLS = {
    "tpu": {"tpu_custom_call": "Pallas"},
    "cuda": {"__cudnn$fmha": "cuDNN", "triton_kernel_call": "Triton"},
}
_MARKS = ("<!-- python -m eval.overview writes what follows -->", "<!-- up to here -->")


@dataclasses.dataclass(frozen=True)
class OverviewOptions(Checked):
    """What to write."""

    root: str = "."
    """The checkout, with README.md and docs/."""
    lower: bool = False
    """Lower a layer of each mechanism again, to see which launch kernels."""


@command(OverviewOptions(), "eval.overview", "Writes docs/mechanisms.md and README's table.")
def main(options: OverviewOptions) -> None:
    root = Path(options.root)
    if not (root / "docs" / "mechanisms.md").exists():
        raise UserError(f"--root: expected a checkout with docs/mechanisms.md, got {root}")
    if options.lower:
        launched = {
            platform: {name: makers for name in MECHANISMS if (makers := kernel_makers(name, platform))}
            for platform in _CALLS
        }
        text = json.dumps(launched, indent=1, sort_keys=True) + "\n"
        write_whole(epath.Path(root / "docs" / "data" / "kernels.json"), text)
    for page, text in written(root).items():
        write_whole(epath.Path(page), text)
    save(draw(pages.cost(root), pages.figures(root).gpu), root / "docs" / "cost.png")


def kernel_makers(name: str, platform: str) -> list[str]:
    """Who made the kernels of a mechanism's layer in bfloat16; nobody if XLA computes all of it."""
    config = default_config(name, _LENGTH)
    dimensions = SpeedOptions(dtype="bfloat16").dimensions(is_causal=config.causal)
    stack = Stack((config,) * config.group, dimensions)
    x = jax.ShapeDtypeStruct((1, _LENGTH, dimensions.d_model), jnp.bfloat16)
    variables = jax.eval_shape(lambda key, x: nn.unbox(stack.init(key, x)), jax.random.key(0), x)

    def forward(variables: Any, x: Any) -> Any:
        return stack.apply(variables, x)[0]

    text = jax.jit(forward).trace(variables, x).lower(lowering_platforms=(platform,)).as_text()
    return [maker for call, maker in _CALLS[platform].items() if call in text]


def written(root: Path) -> dict[Path, str]:
    """The pages that the command writes to, with their new text."""
    figures = pages.figures(root)
    parts = {
        root / "docs" / "mechanisms.md": with_links(full_table(figures)),
        root / "README.md": with_links(short_table(figures), "docs/"),
    }
    return {page: _between_marks(page, part) for page, part in parts.items()}


def _between_marks(page: Path, part: str) -> str:
    text = page.read_text()
    if any(text.count(mark) != 1 for mark in _MARKS):
        raise UserError(f"{page}: expected the lines {_MARKS[0]!r} and {_MARKS[1]!r} once each")
    before, rest = text.split(_MARKS[0])
    return f"{before}{_MARKS[0]}\n\n{part}\n\n{_MARKS[1]}{rest.split(_MARKS[1])[1]}"
