"""Masked language modeling: which tokens are masked and how, what the objective sees, and the command."""

import json

import jax
import numpy as np
import pytest

import eval.tasks.mlm
import train.mlm
from brl_jax.layers import FullConfig
from brl_jax.models import EncoderConfig, MaskedLM
from tests.support.command_lines import TINY_MLM, config_of, last_wins
from tests.support.parameters import drawn
from tests.support.texts import write_splits
from train.data.masking import mask_tokens, num_asked
from train.tasks.mlm import MLM, mlm_objective

MODEL = MaskedLM(
    EncoderConfig(num_layers=1, d_model=8, num_heads=2, d_ff=8, vocab_size=101, mechanism=FullConfig())
)
OPTIONS = {"share": 0.15, "vocab_size": 90, "mask": 100}


def _text(rows, length):
    return np.random.default_rng(0).integers(90, size=(rows, length))


def test_masks_follow_the_paper():
    """Of the chosen tokens 80% become the mask, 10% a random token and 10% stay; the others are untouched."""
    tokens = _text(400, 120)
    batch = mask_tokens(tokens, np.ones(tokens.shape), seed=(1, 2), rows=np.arange(400), **OPTIONS)
    places, shown = batch["places"], np.take_along_axis(batch["tokens"], batch["places"], axis=1)
    assert places.shape == (400, 18)
    assert (np.diff(places, axis=1) > 0).all()
    np.testing.assert_array_equal(batch["targets"], np.take_along_axis(tokens, places, axis=1))
    untouched = np.ones(tokens.shape, bool)
    np.put_along_axis(untouched, places, False, axis=1)
    np.testing.assert_array_equal(batch["tokens"][untouched], tokens[untouched])
    masked, same = (shown == 100).mean(), (shown == batch["targets"]).mean()
    assert abs(masked - 0.8) < 0.02
    assert abs(same - (0.1 + 0.1 / 90)) < 0.015  # a random token may equal the original
    assert shown[shown != 100].max() < 90
    # All positions are equally likely.
    assert np.abs(np.bincount(places.reshape(-1), minlength=120) / 400 - 0.15).max() < 0.08


def test_padding_is_not_asked_for_and_changes_nothing():
    objective = mlm_objective(MODEL)
    tokens, exists = _text(2, 20), np.ones((2, 20))
    exists[1, 12:] = 0
    batch = mask_tokens(tokens, exists, seed=(0, 0), rows=np.arange(2), **OPTIONS | {"share": 0.5})
    assert batch["lengths"].tolist() == [20, 12]
    np.testing.assert_array_equal(batch["weights"][1], batch["places"][1] < 12)
    params = drawn(objective.init)
    loss = jax.jit(lambda batch: objective.loss(params, None, batch, None)[0])
    changed = {**batch, "tokens": np.where(exists > 0, batch["tokens"], 7)}
    assert loss(changed) == loss(batch)
    changed["tokens"] = np.where(np.arange(20) == 11, 7, batch["tokens"])
    assert loss(changed) != loss(batch)


def test_how_many_are_asked_for():
    assert [num_asked(length, 0.15) for length in (1, 4, 10, 128, 512)] == [1, 1, 2, 19, 77]


def test_packed_rows_are_trained_on_as_their_documents_alone():
    """The loss of rows that pack several documents is the sum of the documents' losses in separate rows."""
    objective = mlm_objective(MODEL)
    params = drawn(objective.init)
    tokens = _text(1, 20)
    batch = mask_tokens(tokens, np.ones((1, 20)), seed=(0, 0), rows=np.arange(1), **OPTIONS | {"share": 0.5})
    loss = jax.jit(lambda batch: objective.loss(params, None, batch, None)[0])
    together = loss(batch | {"segment_ids": np.repeat([[0, 1, 2]], [8, 1, 11], axis=1).astype(np.int32)})
    alone = 0.0
    for start, stop in ((0, 8), (8, 9), (9, 20)):
        inside = (batch["places"] >= start) & (batch["places"] < stop)
        alone += loss(
            {
                **batch,
                "tokens": np.roll(batch["tokens"], -start, axis=1),
                "places": (batch["places"] - start) % 20,
                "weights": batch["weights"] * inside,
                "lengths": np.array([stop - start], np.int32),
            }
        )
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    assert abs(float(loss(batch)) - float(alone)) > 1e-3


def _config(text, more="", workdir="x"):
    tiny = TINY_MLM.partition(" --mechanism")[0] if "--mechanism" in more else TINY_MLM
    return config_of(MLM, last_wins(f"mlm --data {text} --workdir {workdir} {tiny} {more}"))


def _batch(text, tmp_path, more=""):
    """A run's configuration with its data, a training batch and a held-out batch."""
    config = _config(text, more, tmp_path / "run")
    data = MLM.load(config, ("train", "valid"))
    config = MLM.sized(config, data)
    mesh = MLM.open_mesh(config)
    streams = MLM.streams(config, data, mesh)
    batches = next(iter(streams.training)), next(iter(streams.held_out))
    for given in batches:
        for name, like in MLM.batch_shapes(config, 8).items():
            assert given[name].shape == like.shape
        assert given.arrays.keys() == MLM.batch_shapes(config, 8).keys()
    return config, *batches


def test_rows_are_packed_where_the_mechanism_can_and_the_text_has_documents(tmp_path):
    """Segment ids change exactly where a document starts in the text."""
    content = "".join(f"@{'abcdefgh'[: 3 + i % 5]}." for i in range(2000)).replace("@", "\n@").lstrip("\n")
    text = write_splits(tmp_path / "text", train=content + "\n", valid=content[:3000] + "\n")
    config, batch, held_out = _batch(text, tmp_path, "--documents @.*")
    assert config.data.pack == "always"
    for given in (batch, held_out):
        shown = given["tokens"].copy()
        np.put_along_axis(shown, given["places"], given["targets"], axis=1)
        begins = shown == ord("@")
        begins[:, 0] = False
        np.testing.assert_array_equal(np.diff(given["segment_ids"], axis=1, prepend=0) > 0, begins)
        assert given["segment_ids"].max() > 2
    for more, pack in (
        ("--documents @.* --pack never", "never"),
        ("--documents @.* --mechanism flash", "never"),
        ("", "never"),
        ("--pack always", "always"),
    ):
        config, batch, _ = _batch(text, tmp_path / (more.replace(" ", "") or "one"), more)
        assert (config.data.pack, "segment_ids" in batch.arrays) == (pack, pack == "always")


def run(workdir, more=""):
    train.mlm.main(
        last_wins(f"--workdir {workdir} {TINY_MLM} --steps 6 --eval_every 3 --checkpoint_every 2 {more}")
    )


@pytest.mark.slow
def test_a_run_is_measured(tmp_path, capsys):
    run(tmp_path / "run")
    assert json.loads((tmp_path / "run/config.json").read_text())["data"]["pack"] == "always"
    capsys.readouterr()
    eval.tasks.mlm.main(["--workdir", str(tmp_path / "run")])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["perplexity"] == pytest.approx(np.exp(result["loss"]))
    assert 0 <= result["accuracy"] <= 1
