"""Evaluations never leave incomplete files."""

import pytest
from matplotlib.figure import Figure

from eval.harness.pictures import save
from tests.support.texts import full_disk


def test_a_picture_is_whole_or_the_earlier_one(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(b"earlier")
    figure = Figure()
    figure.subplots().plot([1, 2])
    with full_disk(100), pytest.raises(OSError, match=r"File too large: .*\.png"):
        save(figure, path)
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]
    assert save(figure, path) == path
    assert path.read_bytes().startswith(b"\x89PNG")
