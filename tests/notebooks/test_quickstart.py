"""The notebooks run top to bottom, as a reader would run them."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


# The kernel and its client warn about sockets and event loops of their own.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_runs_top_to_bottom(path, monkeypatch):
    # A notebook trains, so that programs without optimisations would take longer to run than is saved in compiling.
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without their outputs"
    client = nbclient.NotebookClient(
        notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    errors = [o for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "error"]
    assert not errors
    assert any("image/png" in o.get("data", {}) for c in notebook.cells for o in c.get("outputs", []))
