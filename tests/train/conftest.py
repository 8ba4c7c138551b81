"""Fixtures: a finished run, and what a run needs that starts from another network."""

import pytest

from tests.train.pretrained import write_model, write_text, write_tokenizer


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """A folder with a finished run, of the test file's `run` with its defaults."""
    folder = tmp_path_factory.mktemp("runs")
    request.module.run(folder / "run")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a small random decoder of transformers."""
    place = tmp_path_factory.mktemp("hf")
    write_tokenizer(place / "tokenizer")
    write_model(place / "model", place / "tokenizer")
    return place / "model"
