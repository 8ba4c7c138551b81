"""What MkDocs' pages need beyond Markdown: equations as MathML, so that pages need no script or network for them, and
docstrings' examples, which a line that ends in `::` announces, as in help()."""

import html
import re

from latex2mathml.converter import convert

_EQUATION = re.compile(r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.DOTALL)


def on_page_content(content: str, **_: object) -> str:
    """The hook of MkDocs: the page's HTML with every equation and announcement converted."""

    def mathml(match: re.Match[str]) -> str:
        display = "block" if match[1] == "div" else "inline"
        return convert(html.unescape(match[2]).strip(), display=display)

    return _EQUATION.sub(mathml, content).replace("::</p>", ":</p>")
