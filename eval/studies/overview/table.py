"""The table of all mechanisms as Markdown, whose links stand below it so that its lines stay short."""

from __future__ import annotations

import inspect
import re
import sys

import jax

from brl_jax.layers import MECHANISMS, Dimensions, FullConfig
from brl_jax.models.huggingface.configs import LAYER_TYPES
from brl_jax.models.stack import Stack
from eval.harness.table import Table
from eval.speed.layers import default_config
from eval.studies.overview.pages import LENGTH, Figures

#: The rows of README's table.
SHORT = ("full", "local", "brl", "deltanet", "mamba2", "gated_deltanet_2", "rwkv7")
#: Where a figure comes from, by the label of its link.
SOURCES = {
    "r": "recall.md#what-came-out",
    "t": "results.md#language-modeling",
    "e": "results.md#language-modeling",
    "l": "results.md#whole-layers",
    "g": "measured.md#h200",
    "h": "measured.md#h100",
}
_STATE_LENGTH = 4096


def full_table(figures: Figures) -> str:
    """A row for each listed mechanism, and the addresses of the papers below."""
    table = Table(
        "mechanism", "paper", "TPU", "GPU", "packs", "KiB", "rows", "HF", "recall", "nats", "CPU", "H200"
    )
    for name, config in MECHANISMS.items():
        number = paper(name)
        table.add(
            f"`{name}`",
            f"[{number}]" if number else "",
            _yes(name in figures.kernels["tpu"]),
            "".join(maker[0].lower() for maker in figures.kernels["cuda"].get(name, ())),
            _yes(config().packs, "D") + _yes(config().packs_bidirectional, "E"),
            state(name),
            _yes(name in figures.sharded),
            _yes(config in (FullConfig, *LAYER_TYPES)),
            *measured(name, figures),
        )
    cited = sorted({number for number in map(paper, MECHANISMS) if number})
    addresses = [f"[{number}]: {address(number)}" for number in cited]
    return f"{table}\n\n" + "\n".join(addresses)


def short_table(figures: Figures) -> str:
    """README's rows."""
    table = Table(
        "mechanism", "recall, %", "nats a byte", "state, KiB", "CPU, k tokens/s", "H200, M tokens/s"
    )
    for name in SHORT:
        recall, nats, cpu, gpu = (cell or "-" for cell in measured(name, figures))
        table.add(f"`{name}`", recall, nats, state(name), cpu, gpu)
    return str(table)


def with_links(text: str, folder: str = "") -> str:
    """A table, and below it the addresses of its figures, seen from a page next to `folder`."""
    used = [f"[{label}]: {folder}{source}" for label, source in SOURCES.items() if f"][{label}]" in text]
    return text + "\n\n" + "\n".join(used)


def measured(name: str, figures: Figures) -> tuple[str, ...]:
    """The cells of a mechanism's figures, each with its link; empty where nothing was measured."""
    nats = _linked(figures.nats.get(name), "t") or _linked(figures.earlier_nats.get(name), "e", "*")
    h200, h100 = (
        None if name not in times else LENGTH / times[name] / 1e3 for times in (figures.gpu, figures.h100)
    )
    gpu = _linked(_rate(h200), "g") or _linked(_rate(h100), "h")
    return _linked(figures.recall.get(name), "r"), nats, _linked(_rate(figures.cpu.get(name)), "l"), gpu


def state(name: str) -> str:
    """KiB that generation keeps of a layer after 4,096 tokens, with a plus if more tokens need more."""
    if not MECHANISMS[name]().decodes:
        return ""
    here, later = (_state_bytes(name, length) for length in (_STATE_LENGTH, 2 * _STATE_LENGTH))
    return f"{here / 1024:,.0f}{'+' if later > here else ''}"


def _state_bytes(name: str, length: int) -> int:
    config = default_config(name, length)
    width, heads = 256, 4
    dimensions = Dimensions(width, heads, heads, width // heads, 4 * width, is_causal=True)
    stack = Stack((config,) * config.group, dimensions)
    cache = jax.eval_shape(lambda: stack.init_cache(1, length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)) // config.group


def paper(name: str) -> str | None:
    """The number of the paper that a configuration or its module names first, by arXiv or OpenReview; None if none."""
    config = MECHANISMS[name]
    text = f"{inspect.getdoc(config)}\n{sys.modules[config.__module__].__doc__}"
    found = re.search(r"(?:arXiv:|OpenReview )(\S+?)[.,;:)]*(?=\s|$)", text)
    return found[1] if found else None


def address(number: str) -> str:
    """Where a paper is."""
    return (
        f"https://arxiv.org/abs/{number}"
        if number[0].isdigit()
        else f"https://openreview.net/forum?id={number}"
    )


def _linked(figure: str | None, label: str, mark: str = "") -> str:
    return f"[{mark}{figure}{mark}][{label}]" if figure else ""


def _rate(value: float | None) -> str | None:
    return None if value is None else f"{value:#.3g}"


def _yes(holds: bool, word: str = "✓") -> str:
    return word if holds else ""
