"""The form of README.md and docs/: lines and cells that fit a page, and a command near the top."""

import re
from pathlib import Path

import pytest

import brl_jax

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
)
#: Markdown keeps links and pictures on one line.
WIDEST, LONGEST_CELL = 120, 200
#: What else a reader can click, or what takes an address from the project's configuration.
ADDRESSED = [
    *PAGES,
    *sorted((ROOT / "notebooks").iterdir()),
    *(ROOT / name for name in ("pyproject.toml", "mkdocs.yml", "CITATION.cff")),
]
#: What an address says where its owner or host is still to be named.
PLACEHOLDERS = {"you", "your", "owner", "org", "user", "username", "example"}
RESULTS = ("results", "recall", "copy", "sparse", "forecast", "glue", "structured", "measured", "gradients", "lra",
           "graphs", "regression", "tlinformer", "claims")  # fmt: skip


def _shown(cell):
    """A cell's text without its links' addresses."""
    return re.sub(r"\]\([^)]*\)|\]\[[^\]]*\]", "", cell)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_and_cells(page):
    for number, line in enumerate(page.read_text().splitlines(), 1):
        where = f"{page.name}:{number}"
        if line.lstrip().startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            assert max(len(_shown(cell).strip()) for cell in cells) <= LONGEST_CELL, where
        elif not line.startswith(("![", "[")):
            assert len(line) <= WIDEST, where


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_needs_a_folder_that_nobody_has(page):
    assert "shared/data" not in page.read_text()


def _placeholders(text):
    """Addresses of the web in which a part of the path or of the host is a word of PLACEHOLDERS."""
    addresses = re.findall(r"(?:https?://|\bgit@|\bgithub\.com/)[^\s\"'`\\)]+", text)
    parts = {address: re.split(r"[^a-z]+", re.sub(r"\.org\b", "", address.lower())) for address in addresses}
    return [address for address, words in parts.items() if PLACEHOLDERS.intersection(words)]


@pytest.mark.parametrize("page", ADDRESSED, ids=lambda page: page.name)
def test_no_address_is_a_placeholder(page):
    assert not _placeholders(page.read_text())


def test_placeholders_are_recognized():
    for owner in ("YOU", "OWNER", "YOUR-ORG", "your_name", "<user>", "username", "example-user"):
        assert _placeholders(f"git clone https://github.com/{owner}/brl-jax && cd brl-jax"), owner
    assert _placeholders("[docs](https://brl.example.com/docs)")
    assert not _placeholders("[OpenReview](https://openreview.net/forum?id=Vpyg3fqXbl), github.com/THUDM/HGB")


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT], ids=lambda page: page.name)
def test_a_page_opens_with_a_command(page):
    head = page.read_text().splitlines()[:30]
    assert any(line.startswith("```") for line in head), "no command or code in the first 30 lines"


@pytest.mark.parametrize("name", RESULTS)
def test_a_page_of_results_says_when_and_where(name):
    """The date, the commit and the machine, in one line that begins with Measured."""
    text = (ROOT / "docs" / f"{name}.md").read_text()
    said = re.search(r"^Measured (.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    assert said is not None
    assert re.search(r"20\d\d", said[1]), said[0]
    assert re.search(r"\b[0-9a-f]{7}\b", said[1]), said[0]
    assert re.search(r"core|H100|H200|GPU", said[1]), said[0]


def test_the_changelog_has_the_version_and_is_one_page():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(brl_jax.__version__)}\] - 20\d\d-\d\d-\d\d$", text, re.MULTILINE)
    assert len(text.split()) <= 800


def test_the_first_screen():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1000
    first = "\n".join(text.splitlines()[:40])
    for part in (
        "pip install",
        "jax.nn.dot_product_attention",
        "local_attention",
        "linear_attention",
        "docs/cost.png",
    ):
        assert part in first


def test_every_claim_has_an_entry():
    text = (ROOT / "docs" / "claims.md").read_text()
    rows, entries = (re.findall(rf"^{begin}([A-Z]\d+)\.", text, re.M) for begin in (r"\| ", r"\*\*"))
    assert rows
    assert rows == entries
