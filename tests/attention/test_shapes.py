"""A runtime checker accepts every call of these tests: the shapes and dtypes in attention's signatures are true.

The checker must be chosen before brl_jax is imported, so this runs in another process."""

import pytest

from tests.support.processes import python


@pytest.mark.slow
def test_annotations_are_true():
    line = (
        "-m pytest -q -n 0 -p no:cacheprovider tests/attention/test_oracles.py "
        "tests/attention/compressed/test_compress.py::test_compress_oracle "
        "tests/attention/compressed/test_compress.py::test_propagate_oracle "
        "tests/attention/compressed/test_blocks.py::test_each_block_reads_what_precedes_it"
    )
    done = python(*line.split(), BRL_JAX_CHECK_SHAPES="1")
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_the_checker_refuses_a_lie():
    code = (
        "import tests.conftest, jax.numpy as jnp\n"
        "from brl_jax.attention.core.rotary import rotate\n"
        "rotate(jnp.ones((1, 4, 2, 8)), jnp.ones((1, 5), int))\n"
    )
    done = python("-c", code, BRL_JAX_CHECK_SHAPES="1")
    assert "TypeCheckError" in done.stderr, done.stderr[-2000:]
