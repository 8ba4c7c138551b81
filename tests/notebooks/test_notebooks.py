"""The notebooks run from top to bottom, and their first cells let them open on Colab."""

import re
import tomllib
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def _notebook(path):
    return nbformat.read(path, as_version=4)


# The kernel and its client raise warnings about sockets and event loops.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_top_to_bottom(path, monkeypatch, tmp_path):
    # A notebook trains, so unoptimized programs would lose more time running than they save in compiling.
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    notebook = _notebook(path)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without their outputs"
    client = nbclient.NotebookClient(
        notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    errors = [o for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "error"]
    assert not errors
    assert any("image/png" in o.get("data", {}) for c in notebook.cells for o in c.get("outputs", []))


def test_opens_on_colab():
    """Each notebook starts with a link to itself, then the one cell that installs the library, all from one
    repository."""
    (address,) = set(
        re.findall(r"https://(github\.com/\S+/brl-jax)", (ROOT / "docs" / "pods.md").read_text())
    )
    setups = set()
    for path in NOTEBOOKS:
        title, setup, *rest = _notebook(path).cells
        link = (
            f"https://colab.research.google.com/{address.replace('.com', '')}/blob/main/notebooks/{path.name}"
        )
        assert title.source.startswith("[![Open in Colab]("), path.name
        assert f"({link})\n\n# " in title.source, path.name
        assert not any("git clone" in cell.source for cell in rest), path.name
        setups.add(setup.source)
    (setup,) = setups
    assert f"git clone -q https://{address} /content/brl-jax\n" in setup
    # Outside Colab only the import runs.
    assert re.sub(r'if "google.colab" in sys.modules:\n(    .*\n?)+', "", setup).splitlines()[1:] == [
        "import sys",
        "",
    ]


def test_colab_keeps_its_own_kernel():
    extras = re.search(r"\.\.\[(.*)\]", (ROOT / "notebooks" / "colab.sh").read_text())[1].split(",")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = [package for extra in extras for package in known[extra]]
    assert not [package for package in installed if re.match("brl-jax|ipykernel|nbclient|nbformat", package)]


def test_are_listed():
    for page in (ROOT / "README.md", ROOT / "docs" / "doors.md"):
        assert set(re.findall(r"notebooks/(\w+)\.ipynb", page.read_text())) == {p.stem for p in NOTEBOOKS}
