"""The documentation's site builds without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import brl_jax

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_in_the_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = re.findall(r"^::: brl_jax\.(\w+)$", pages, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == set(brl_jax.__all__) - {"MECHANISMS", "TRANSNORMER_SIZES"}


@pytest.mark.slow
def test_site_builds(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    families = (tmp_path / "families" / "local" / "index.html").read_text()
    assert "<math" in families
    assert 'class="arithmatex"' not in families
    assert "brl_jax.local_attention" in (tmp_path / "api" / "functions" / "index.html").read_text()
