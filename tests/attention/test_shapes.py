"""A runtime checker accepts every call of this file: the shapes and dtypes in attention's signatures are true.

The checker must be chosen before brl_jax is imported, so this runs in another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = "tests/attention/test_plain_forms.py"


@pytest.mark.slow
def test_annotations_are_true():
    line = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", FILE]
    done = subprocess.run(
        line, cwd=ROOT, env=os.environ | {"BRL_JAX_CHECK_SHAPES": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_the_checker_refuses_a_lie():
    code = (
        "import tests.conftest, jax.numpy as jnp\n"
        "from brl_jax.attention.compressed import reference\n"
        "x = jnp.ones((1, 4, 2, 8))\n"
        "reference.propagate(x, jnp.ones((1, 3, 2, 6)), x, strength=jnp.ones((1,)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"BRL_JAX_CHECK_SHAPES": "1"},
        capture_output=True,
        text=True,
    )
    assert "TypeCheckError" in done.stderr, done.stderr[-2000:]
