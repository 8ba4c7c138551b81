"""Evaluations never leave incomplete files."""

import resource

import pytest
from matplotlib.figure import Figure

from eval.harness.pictures import save


def test_a_picture_is_whole_or_the_earlier_one(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(b"earlier")
    figure = Figure()
    figure.subplots().plot([1, 2])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(figure, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]
    assert save(figure, path) == path
    assert path.read_bytes().startswith(b"\x89PNG")
