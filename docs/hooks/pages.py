"""What MkDocs' pages need beyond Markdown: equations as MathML, so that pages need no script or network for them,
docstrings' examples, which a line that ends in `::` announces, as in help(), and the pages of the reference, one for
each module with public names."""

import html
import re

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import brl_jax

_EQUATION = re.compile(r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.DOTALL)
_SECTIONS = {
    "local": "Local",
    "compressed": "Compressed (BRL)",
    "recurrent": "Recurrent",
    "structured": "Structured",
    "low_rank": "Low rank",
    "sorting": "Sorting and hashing",
    "dense": "Dense",
    "core": "Biases",
    "networks": "Networks",
}
_PROTOCOL = "brl_jax.layers.core.protocol"
_LETTERS = (
    "Letters of shapes: B batch, T queries, S keys, N query heads, K key/value heads, H head dimension, V value head "
    "dimension, M compressed tokens."
)


def reference() -> dict[str, dict[str, list[str]]]:
    """The public names of each page of the reference, by section and page."""
    pages: dict[str, dict[str, list[str]]] = {section: {} for section in _SECTIONS}
    for name in brl_jax.__all__:
        module = getattr(getattr(brl_jax, name), "__module__", "")
        _, *path = module.split(".")
        if not path:  # constants such as MECHANISMS are neither functions nor classes
            continue
        section, page = "networks", path[-1]
        if (
            path[0] in ("attention", "layers")
            and path[1] in _SECTIONS
            and len(path) == 3
            and module != _PROTOCOL
        ):
            section = path[1]
            page = "attention" if path[-1] == "api" else path[-1]
            if path[0] == "layers":
                convolved = hasattr(getattr(brl_jax, name), "conv_size")
                page = "configurations_with_convolutions" if convolved else "configurations"
        pages[section].setdefault(page, []).append(name)
    return pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The hook of MkDocs: the reference's pages at the end of the menu."""
    sections = [
        {_SECTIONS[section]: [{page: _address(section, page)} for page in sorted(pages)]}
        for section, pages in reference().items()
    ]
    config.nav = [*(config.nav or []), {"Reference": sections}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The hook of MkDocs: the reference's pages."""
    for section, pages in reference().items():
        for page, names in pages.items():
            title = page.replace("_", " ").capitalize()
            letters = [_LETTERS] if section != "networks" and not page.startswith("configurations") else []
            parts = [f"# {title}", *letters, *(f"::: brl_jax.{name}" for name in sorted(names, key=_order))]
            files.append(File.generated(config, _address(section, page), content="\n\n".join(parts) + "\n"))
    return files


def _address(section: str, page: str) -> str:
    return f"api/{section}/{page}.md"


def _order(name: str) -> tuple[bool, str]:
    """States come after the functions that they are for."""
    return name.startswith("init_"), name


def on_page_content(content: str, **_: object) -> str:
    """The hook of MkDocs: the page's HTML with every equation and announcement converted."""

    def mathml(match: re.Match[str]) -> str:
        display = "block" if match[1] == "div" else "inline"
        return convert(html.unescape(match[2]).strip(), display=display)

    return _EQUATION.sub(mathml, content).replace("::</p>", ":</p>")
