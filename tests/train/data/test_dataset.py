"""Loading: data are made once, kept complete or not at all, and fixed when the run starts."""

import functools
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.texts import full_disk, write_splits
from train.data import corpus as corpus_module
from train.data.dataset import DataConfig, forget_unstarted, load
from train.data.streams import EvalStream
from train.data.tokenizers.named import BytesTokenizer, load_tokenizer
from train.data.tokenizers.pieces import text_pieces
from train.engine.errors import UserError


@pytest.fixture
def text(tmp_path):
    sizes = {"train": 400, "valid": 30, "test": 20}
    write_splits(
        tmp_path / "text",
        **{name: "".join(f" the line {i % 37} of {name} \n" for i in range(n)) for name, n in sizes.items()},
    )
    return tmp_path / "text"


def config(text, **kwargs):
    return DataConfig(data=f"text:{text}/*.txt", **kwargs)


def hidden(folder):
    return [p for p in Path(folder).rglob("*") if p.name.startswith(".")]


@pytest.mark.parametrize("spec", ["bytes", "bpe:300", "words", "words:2", "words:max=20"])
def test_loaded_corpora_are_the_text(text, tmp_path, spec):
    tokenizer, corpora = load(config(text, tokenizer=spec), tmp_path / "run")
    assert list(corpora) == ["train", "valid", "test"]
    for name, corpus in corpora.items():
        original = (text / f"{name}.txt").read_text()
        assert corpus.tokens.dtype == tokenizer.dtype
        assert isinstance(corpus.tokens.base, np.memmap)
        assert not corpus.tokens.flags.writeable
        assert corpus.num_bytes() == len(original.encode())
        assert corpus.num_bytes(0, 7) + corpus.num_bytes(7) == corpus.num_bytes()
        if not spec.startswith("words"):
            assert tokenizer.decode(corpus.tokens) == original
    first = corpora["valid"].num_bytes(0, 1)
    assert EvalStream(corpora["valid"], batch=2, length=8).num_bytes == corpora["valid"].num_bytes() - first
    assert load_tokenizer(tmp_path / "run").digest == tokenizer.digest
    assert not hidden(tmp_path / "run")


@pytest.mark.parametrize("spec", ["bpe:300", "words", "words:max=5"])
def test_every_run_of_lines_has_the_bytes_of_its_lines(text, tmp_path, monkeypatch, spec):
    monkeypatch.setattr(corpus_module, "text_pieces", functools.partial(text_pieces, size=100))
    tokenizer, corpora = load(config(text, tokenizer=spec), tmp_path / "run")
    lines = (text / "train.txt").read_text().splitlines(keepends=True)
    ids = corpora["train"].tokens
    ends = [0] + [i + 1 for i in range(len(ids)) if tokenizer.decode(ids[i : i + 1]).endswith("\n")]
    assert len(ends) == len(lines) + 1
    for first, last in (0, 1), (0, 400), (7, 9), (100, 300), (399, 400), (5, 5):
        assert corpora["train"].num_bytes(ends[first], ends[last]) == len("".join(lines[first:last]))


def test_a_full_disk_is_named_and_leaves_nothing(text, tmp_path):
    message = r"^--workdir: cannot write under .*run: File too large$"
    with full_disk(1000), pytest.raises(UserError, match=message):
        load(config(text), tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.npy"))
    assert not hidden(tmp_path / "run")


def test_a_run_keeps_its_text(text, tmp_path):
    run = tmp_path / "run"
    _, first = load(config(text, tokenizer="words"), run)
    (text / "train.txt").write_text("another text\n" * 100)
    _, again = load(config(text, tokenizer="words"), run)
    assert again["train"].digest == first["train"].digest
    shutil.rmtree(text)
    tokenizer, again = load(config(text, tokenizer="words"), run)
    assert {n: c.digest for n, c in again.items()} == {n: c.digest for n, c in first.items()}
    assert list(load(config(text, tokenizer="words"), run, ("valid",))[1]) == ["valid"]
    # With its tokens gone too, the run makes them again from the current text with its own vocabulary.
    shutil.rmtree(run / "data")
    with pytest.raises(UserError, match="no file matches"):
        load(config(text, tokenizer="words"), run)
    write_splits(text, "another text\n" * 100)
    changed, corpora = load(config(text, tokenizer="words"), run)
    assert changed.digest == tokenizer.digest
    assert corpora["train"].digest != first["train"].digest
    assert set(corpora) == {"train", "valid"}


def test_runs_share_a_cache_and_see_when_the_text_changes(text, tmp_path, monkeypatch):
    made = []
    build = corpus_module._build
    monkeypatch.setattr(corpus_module, "_build", lambda *a: (made.append(a[1]), build(*a)))
    shared = config(text, tokenizer="bpe:300", cache_dir=str(tmp_path / "cache"))
    first = load(shared, tmp_path / "one")
    second = load(shared, tmp_path / "two")
    assert made == ["train", "valid", "test"]
    assert second[0].digest == first[0].digest
    assert not (tmp_path / "two" / "data").exists()
    (text / "valid.txt").write_text("something else\n" * 50)
    third = load(shared, tmp_path / "three")
    assert made == ["train", "valid", "test"] * 2
    assert third[1]["valid"].digest != first[1]["valid"].digest


def test_another_text_is_for_evaluation_only(text, tmp_path):
    run = tmp_path / "run"
    tokenizer, _ = load(config(text, tokenizer="words"), run)
    manifest = (run / "data.json").read_text()
    (tmp_path / "other.test.txt").write_text("the line of zebras\n")
    other = DataConfig(data=f"text:{tmp_path}/other.test.txt", tokenizer="words")
    with pytest.raises(
        UserError, match=r"^--data: the run in .*run was started with 'text:.*another --workdir$"
    ):
        load(other, run)
    same, corpora = load(other, run, ("test",))
    assert same.digest == tokenizer.digest
    assert same.decode(corpora["test"].tokens) == "the line of <unk>\n"
    assert corpora["test"].num_bytes() == len("the line of zebras\n")
    assert (run / "data.json").read_text() == manifest
    with pytest.raises(UserError, match="has no valid text, only test"):
        load(other, run, ("valid",))
    with pytest.raises(UserError, match="has no train text, only test"):
        load(other, tmp_path / "new")


@pytest.mark.parametrize("change", [{"tokenizer": "bpe:300"}, {"holdout": 0.1}])
def test_another_configuration_of_the_same_run_is_refused(text, tmp_path, change):
    load(config(text), tmp_path / "run")
    name = next(iter(change))
    with pytest.raises(
        UserError, match=f"^--{name}: the run in .* was started with .*, got .*{change[name]}"
    ):
        load(config(text, **change), tmp_path / "run")


def test_the_tokenizer_of_another_run_is_not_replaced(text, tmp_path):
    """A run on shards or on pairs of texts has a tokenizer but no data.json."""
    run = tmp_path / "run"
    tokenizer, _ = load(config(text, tokenizer="words"), run)
    (run / "data.json").unlink()
    with pytest.raises(UserError, match=r"--data: the run in .* has another tokenizer; expected the data"):
        load(config(text, tokenizer="bpe:300"), run)
    assert load_tokenizer(run).digest == tokenizer.digest


def test_files_of_others_stay_where_no_run_has_begun(text, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "data.json").write_text('{"tokenizer": "theirs"}')
    (run / "tokenizer_config.json").write_text('{"tokenizer_class": "theirs"}')
    forget_unstarted(run)
    assert {path.name for path in run.iterdir()} == {"data.json", "tokenizer_config.json"}
    load(config(text), tmp_path / "ours")
    forget_unstarted(tmp_path / "ours")
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {"data"}
    # Runs on pairs of texts, shards and mixtures have a tokenizer but no data.json.
    load(config(text), tmp_path / "pairs")[0].save(tmp_path / "pairs")
    (tmp_path / "pairs" / "data.json").unlink()
    forget_unstarted(tmp_path / "pairs")
    assert {path.name for path in (tmp_path / "pairs").iterdir()} == {"data"}
    # A run that was stopped before its first checkpoint begins anew, and one that has a checkpoint goes on.
    load(config(text), tmp_path / "stopped")
    (tmp_path / "stopped" / "config.json").write_text("{}")
    (tmp_path / "stopped" / "checkpoints" / "1").mkdir(parents=True)
    forget_unstarted(tmp_path / "stopped")
    assert (tmp_path / "stopped" / "data.json").exists()
    (tmp_path / "stopped" / "checkpoints" / "1").rmdir()
    forget_unstarted(tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "data.json").exists()
    forget_unstarted(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_run_among_its_texts_does_not_read_its_own_words(text):
    for _ in range(2):  # what was made is gone, and made again
        corpus = load(config(text, tokenizer="words"), text)[1]["train"]
        assert (text / "vocab.txt").exists()
        assert corpus.num_bytes() == (text / "train.txt").stat().st_size
        shutil.rmtree(text / "data")
    forget_unstarted(text)
    assert sorted(path.name for path in text.iterdir()) == ["test.txt", "train.txt", "valid.txt"]


def test_a_split_the_text_does_not_have(text, tmp_path):
    (text / "test.txt").unlink()
    assert list(load(config(text), tmp_path / "run")[1]) == ["train", "valid"]
    for _ in range(2):
        with pytest.raises(UserError, match="has no test text, only train, valid"):
            load(config(text), tmp_path / "run", ("test",))


def test_a_share_held_out_of_a_text_with_validation_text(text, tmp_path):
    with pytest.raises(UserError, match=r"^--holdout has no effect with text:.*, which has validation text$"):
        load(config(text, holdout=0.1), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert list(load(config(text, holdout=0.1), tmp_path / "eval", ("test",))[1]) == ["test"]
    for name in ("valid", "test"):
        (text / f"{name}.txt").unlink()
    corpora = load(config(text, holdout=0.25), tmp_path / "run")[1]
    assert len(corpora["valid"].tokens) == pytest.approx(len(corpora["train"].tokens) / 3, rel=0.05)


class Failing(BytesTokenizer):
    """Breaks in the middle of a text."""

    def encode_corpus(self, pieces):
        for encoded in super().encode_corpus(pieces):
            yield encoded
            raise KeyboardInterrupt


def test_what_was_stopped_halfway_leaves_nothing(text, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("train.data.dataset.train_tokenizer", lambda *_: Failing())
        with pytest.raises(KeyboardInterrupt):
            load(config(text), run)
    assert not [p for p in run.rglob("*") if p.is_file()]
    assert list(load(config(text), run)[1]) == ["train", "valid", "test"]


@pytest.mark.parametrize("damage", ["cut", "other", "summary", "extra", "starts"])
def test_damaged_tokens_are_made_again(text, tmp_path, damage):
    _, corpora = load(config(text), tmp_path / "run")
    folder = next((tmp_path / "run" / "data").glob("tokens-*"))
    whole = (folder / "train.npy").read_bytes()
    if damage == "cut":
        (folder / "train.npy").write_bytes(whole[:-100])
    elif damage == "other":
        np.save(folder / "train.npy", corpora["valid"].tokens)
    else:
        (folder / ("train.json" if damage == "summary" else f"train.{damage}.npy")).write_text("")
    _, again = load(config(text), tmp_path / "run")
    assert again["train"].digest == corpora["train"].digest
    np.testing.assert_array_equal(again["train"].starts, [0])
    assert (folder / "train.npy").read_bytes() == whole


@pytest.mark.parametrize("option", ["workdir", "cache_dir"])
def test_a_place_that_cannot_be_written_is_named(text, tmp_path, option):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "run"
    workdir, cache = (place, None) if option == "workdir" else (tmp_path / "run", str(place))
    with pytest.raises(UserError, match=f"^--{option}: cannot write under .*file/run.*: Not a directory$"):
        load(config(text, cache_dir=cache), workdir)
