"""The code of docs/functions.md runs as it stands."""

import importlib.util
import re
from pathlib import Path

import jax
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "functions.md"


@pytest.mark.slow
def test_the_blocks_run_one_after_the_other():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 7
    names: dict[str, object] = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            if "equinox" in block and importlib.util.find_spec("equinox") is None:
                continue
            exec(compile(block, str(PAGE), "exec"), names)
