"""The documentation's site builds without a warning."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import brl_jax

ROOT = Path(__file__).parents[2]


def reference():
    """The hook's function of this name, by the pages' addresses under docs/."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "hooks" / "pages.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return {
        f"api/{section}/{page}.md": names
        for section, pages in hook.reference().items()
        for page, names in pages.items()
    }


def test_every_public_name_is_in_the_reference():
    pages = reference()
    listed = [name for names in pages.values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(brl_jax.__all__) - {"MECHANISMS", "TRANSNORMER_SIZES"}
    # A page of the reference is one family's module, or the configurations of a family's mechanisms.
    assert max(len(names) for names in pages.values()) <= 16


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
    assert "brl_jax.local_attention" in (tmp_path / "api" / "local" / "attention" / "index.html").read_text()
