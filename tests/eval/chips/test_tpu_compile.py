"""The command that compiles every kernel for every chip, on one chip with short sequences (needs the package
libtpu)."""

import importlib.util

import jax.numpy as jnp
import pytest

from eval.chips import tpu_compile
from train.engine.errors import RunError


@pytest.mark.usefixtures("uncached")
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_prints_a_row_for_each_kernel_and_names_what_fails(capsys, monkeypatch):
    arguments = ["--chips", "v5e", "--lengths", "1024", "2048", "--windows", "128", "--compressed", "64"]
    arguments += ["--heads", "2", "--head_dims", "128"]
    tpu_compile.main(arguments)
    table = capsys.readouterr().out
    for what in (
        "window 128",
        "blocks, window 128",
        "compress 64",
        "propagate 64",
        "compress_blocks 64",
        "gated delta",
    ):
        assert f"v5e 128 n=2048 {what}: " in table
    assert "fails" not in table
    assert "for 2 n" in table
    assert "v5e 128 n=4096 window 128: " in table

    monkeypatch.setattr(tpu_compile, "cases", lambda *_: [("broken", jnp.linalg.eig, [(1, 4, 1, 4)])])
    with pytest.raises(
        RunError, match="3 failures, the first: v5e, head dim 128, n = 1024, broken does not compile: "
    ):
        tpu_compile.main(arguments)


@pytest.mark.parametrize(
    ("longest", "doubled", "words", "faster"),
    [
        (300, 600, "2.00", False),
        (300, 500, "1.67", False),
        (18, 38, "2.11", True),
        (0, 0, "0", False),
        (0, 1, "1 after 0", True),
        (5, None, "", False),
    ],
)
def test_growth_beyond_the_length_is_reported(longest, doubled, words, faster):
    assert tpu_compile.growth(longest, doubled) == (words, faster)
