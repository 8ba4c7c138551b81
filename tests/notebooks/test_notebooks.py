"""The notebooks run from top to bottom, and their first cell installs the library on Colab."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.support.processes import python

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


@pytest.mark.slow
def test_names_and_arguments_exist(tmp_path):
    """The packages change without a thought of the notebooks, and running all of them takes half an hour."""
    # A notebook may give a name another kind of value. As a comment, this leaves mypy's cache of the packages as it is.
    allowed = "arg-type, assignment, call-overload, index, misc, operator, union-attr, var-annotated"
    for path in NOTEBOOKS:
        code = "\n".join(cell.source for cell in _notebook(path).cells if cell.cell_type == "code")
        (tmp_path / f"notebook_{path.stem}.py").write_text(
            f'# mypy: disable-error-code="{allowed}"\n'
            + re.sub(r"^( *)[!%].*", r"\1pass", code, flags=re.MULTILINE)
        )
    result = python("-m", "mypy", *map(str, sorted(tmp_path.iterdir())))
    assert not result.returncode, result.stdout


def test_first_cell_installs_on_colab(tmp_path):
    """Each notebook starts with its title, then the one cell that installs the archive of a checkout which its comment
    and docs/doors.md make."""
    setups = set()
    for path in NOTEBOOKS:
        title, setup, *rest = _notebook(path).cells
        assert title.source.startswith("# "), path.name
        assert not any("google.colab" in cell.source for cell in rest), path.name
        setups.add(setup.source)
    (setup,) = setups
    # Outside Colab only the import runs.
    assert re.sub(r'if "google.colab" in sys.modules:\n(    .*\n?)+|#.*\n', "", setup).split() == [
        "import",
        "sys",
    ]
    (archive,) = re.findall(r"^# +(git archive .*)$", setup, re.MULTILINE)
    assert archive in (ROOT / "docs" / "doors.md").read_text().splitlines()
    here = tmp_path / "brl-jax.tar.gz"
    subprocess.run(shlex.split(archive.replace("-o brl-jax.tar.gz", f"-o {here}")), cwd=ROOT, check=True)
    (unpack,) = re.findall(r"!(tar .*)", setup)
    subprocess.run(shlex.split(unpack.replace("/content", str(tmp_path))), check=True)
    for path in re.findall(r"/content/(brl-jax/\S+)", setup.replace(unpack, "")):
        assert (tmp_path / path).exists(), path


def test_colab_keeps_its_own_kernel():
    extras = re.search(r"\.\.\[(.*)\]", (ROOT / "notebooks" / "colab.sh").read_text())[1].split(",")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = [package for extra in extras for package in known[extra]]
    assert not [package for package in installed if re.match("brl-jax|ipykernel|nbclient|nbformat", package)]


def test_are_listed():
    for page in (ROOT / "README.md", ROOT / "docs" / "doors.md"):
        assert set(re.findall(r"notebooks/(\w+)\.ipynb", page.read_text())) == {p.stem for p in NOTEBOOKS}
