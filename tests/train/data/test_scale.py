"""Data larger than memory: token shards, streamed data sets, mixtures and existing tokenizers."""

import itertools
import json
import sys

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from tests.support.processes import started
from tests.support.texts import corpus_of, rows_of_json, write_splits
from train.cli.command import command
from train.data import hf_stream, write_shards
from train.data.dataset import DataConfig, load, training_batches
from train.data.mixture import SEGMENT_STEPS, Mixture, joined, parse_mixture
from train.data.shards import open_shards
from train.data.sources import open_source
from train.data.tokenizers.named import load_tokenizer, train_tokenizer
from train.engine.errors import UserError
from train.tokenize import main as tokenize

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "été", "zeta")


def _lines(count, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=6)) for _ in range(count)]


@pytest.fixture
def text(tmp_path):
    train, valid = ("\n".join(_lines(*given)) + "\n" for given in ((1000,), (300, 1)))
    return write_splits(tmp_path / "text", train=60 * train, valid=valid)


def _take(stream, count):
    batches = list(itertools.islice(stream, count))
    return np.stack([batch["tokens"] for batch in batches])


def _tokenized(text, folder, *more):
    tokenize(["--data", text, "--out", str(folder), "--workers", "1", "--shard_megabytes", "1", *more])


@pytest.mark.slow
def test_shards_are_the_tokens_of_the_text(text, tmp_path, capsys):
    """The same batches as from the text itself, whichever rows a process reads, and after a restart."""
    folder = tmp_path / "the shards"
    _tokenized(text, folder, "--record", "1000")
    assert len(list(folder.glob("train-*.array_record"))) == 3
    assert f"next: python -m train.lm --data 'tokens:{folder}'" in capsys.readouterr().err
    tokenizer, shards = load(DataConfig(data=f"tokens:{folder}"), tmp_path / "run")
    _, whole = load(DataConfig(data=text), tmp_path / "other")
    assert len(shards["train"].tokens) == len(whole["train"].tokens)
    assert tokenizer.spec == "bytes"
    np.testing.assert_array_equal(shards["valid"].tokens, whole["valid"].tokens)
    sizes = {"batch": 8, "length": 300, "seed": 3}
    expected = _take(training_batches(whole["train"], **sizes), 30)
    np.testing.assert_array_equal(_take(training_batches(shards["train"], **sizes), 30), expected)
    own = training_batches(shards["train"], **sizes, rows=[2, 5])
    np.testing.assert_array_equal(_take(own, 10), expected[:10, [2, 5]])
    again = training_batches(shards["train"], **sizes)
    again.set_state(own.get_state())
    np.testing.assert_array_equal(_take(again, 20), expected[10:])


def _interrupted(parts, *about, **options):
    yield next(parts)[0]
    raise KeyboardInterrupt


@pytest.mark.slow
def test_workers_end_with_a_command_that_is_killed():
    code = (
        "import os, time; from train.data.worker_pool import worker_pool\n"
        "with worker_pool(1) as submit: print(submit(os.getpid).result(), flush=True); time.sleep(600)"
    )
    process = started("-c", code)
    process.stdout.readline()
    process.kill()
    process.communicate(timeout=120)  # returns once the worker, which has the same stdout, has ended


@pytest.mark.slow
def test_tokenising_goes_on_where_it_stopped(text, tmp_path, monkeypatch, capsys):
    """Only missing shards are written again; a different text or tokenizer is refused."""
    folder = tmp_path / "shards"
    _tokenized(text, folder, "--tokenizer", "bpe:300")
    shards = sorted(folder.glob("*.array_record"))
    before = {path.name: path.read_bytes() for path in shards}
    (folder / "train-00001.json").unlink()
    (folder / "tokens.json").unlink()
    kept = {path.name: path.stat().st_mtime_ns for path in shards}
    with pytest.raises(UserError, match="no tokens there"):
        load(DataConfig(data=f"tokens:{folder}"), tmp_path / "run")
    _tokenized(text, folder, "--tokenizer", "bpe:300")
    assert {path.name: path.read_bytes() for path in folder.glob("*.array_record")} == before
    changed = [name for name in kept if (folder / name).stat().st_mtime_ns != kept[name]]
    assert changed == ["train-00001.array_record"]
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    for path in (folder / "tokens.json", *folder.glob("train-*")):
        path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(write_shards, "tracked", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            _tokenized(text, folder, "--tokenizer", "bpe:300")
    assert not [path.name for path in folder.iterdir() if "train-" in path.name]  # nor the queued one
    line = ["tokenize", "--data", text, "--out", str(folder), "--record", "7"]
    monkeypatch.setattr(sys, "argv", line)
    assert command(tokenize, "train.tokenize") == 2
    assert "--out: " in capsys.readouterr().err


def _dataset(folder, files):
    """A local data set of JSON lines, which `datasets` streams like one from the hub."""
    texts = {f"train-{number}": _lines(40, number) for number in range(files)}
    rows_of_json(folder, texts | {"validation-0": _lines(30, 99)})
    return f"hf-stream:{folder}"


def test_a_streamed_data_set_resumes_bit_for_bit_with_other_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    spec = _dataset(tmp_path / "set", 4)
    _, corpora = load(DataConfig(data=spec), tmp_path / "run")
    assert len(corpora["valid"].tokens) == sum(len(line.encode()) + 1 for line in _lines(30, 99))
    sizes = {"batch": 4, "length": 100, "seed": 0}
    monkeypatch.setattr(hf_stream, "_SHUFFLED_DOCUMENTS", 7)
    whole = training_batches(corpora["train"], **sizes)
    expected = _take(whole, 40)
    whole.close()
    # Row b keeps reading file b, in a new order each pass.
    for b in range(4):
        lines = bytes(expected[:, b].astype(np.uint8)).decode().split("\n")
        passes = [lines[:40], lines[40:80]]
        assert [sorted(each) for each in passes] == [sorted(_lines(40, b))] * 2
        assert passes[0] != passes[1]
    stream = training_batches(corpora["train"], **sizes)
    np.testing.assert_array_equal(_take(stream, 17), expected[:17])
    state = json.loads(json.dumps(stream.get_state()))
    stream.close()
    # Two processes with two rows each resume from the state of one process.
    for rows in ([0, 1], [2, 3]):
        part = training_batches(corpora["train"], **sizes, rows=rows)
        part.set_state(state)
        np.testing.assert_array_equal(_take(part, 23), expected[17:, rows])
        part.close()
    with pytest.raises(UserError, match="input position is of length 100, now it is 50"):
        training_batches(corpora["train"], batch=4, length=50, seed=0).set_state(state)
    # Other files are other data, for a new run's held-out tokens too.
    rows_of_json(tmp_path / "set", {"validation-0": ["another"]})
    _, others = load(DataConfig(data=spec, cache_dir=str(tmp_path / "run" / "data")), tmp_path / "new")
    assert bytes(others["valid"].tokens) == b"another\n"
    with pytest.raises(UserError, match="input position is of digest"):
        training_batches(others["train"], **sizes).set_state(state)


def test_the_seed_decides_the_order_of_a_streamed_data_set(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    _, corpora = load(DataConfig(data=_dataset(tmp_path / "set", 4)), tmp_path / "run")
    taken, states = [], []
    for seed in (0, 1, 0):
        stream = training_batches(corpora["train"], batch=4, length=50, seed=seed)
        taken.append(_take(stream, 5))
        states.append(stream.get_state())
        stream.close()
    np.testing.assert_array_equal(taken[2], taken[0])
    assert (taken[1] != taken[0]).any(axis=(0, 2)).all()
    with pytest.raises(UserError, match="input position is of seed 0, now it is 1"):
        training_batches(corpora["train"], batch=4, length=50, seed=1).set_state(states[0])


@pytest.mark.parametrize("files", [1, 3, 4])
def test_a_streamed_data_set_never_trains_on_what_it_holds_out(tmp_path, monkeypatch, files):
    """The first documents of all files are held out, and each row reads a different file if there are enough.

    Every other document is read once per pass."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hf_stream, "_HELD_OUT_DOCUMENTS", 10)
    folder, count = tmp_path / "set", 24 if files == 1 else 12
    texts = {f"train-{n}": [f"{n}{document:03d}" for document in range(count)] for n in range(files)}
    written = [text for each in texts.values() for text in each]
    rows_of_json(folder, texts)
    _, corpora = load(DataConfig(data=f"hf-stream:{folder}"), tmp_path / "run")
    held_out = bytes(corpora["valid"].tokens).decode().split()
    assert held_out == written[:10]
    stream = training_batches(corpora["train"], batch=4, length=5, seed=0)
    # A document has five bytes. Before its second pass a row reads at most 24 documents (6 if the rows share a file).
    read = _take(stream, 24).astype(np.uint8)
    stream.close()
    documents = {bytes(row).decode().strip() for batch in read for row in batch}
    assert documents == set(written[10:])


def _corpus(letter, size):
    return corpus_of(np.full(size, letter, np.uint8), digest=f"{letter}{size}")


def test_a_mixture_has_its_weights_in_every_segment():
    assert parse_mixture("3*text:a,b.txt,1*stdlib") == {"text:a,b.txt": 0.75, "stdlib": 0.25}
    assert parse_mixture("1e-1*text:a,.3*stdlib") == pytest.approx({"text:a": 0.25, "stdlib": 0.75})
    for wrong in ("", "text:a", "0*stdlib", "1*stdlib,1*stdlib", "1*mix:1*stdlib"):
        with pytest.raises(UserError, match="--data mix: "):
            parse_mixture(wrong)
    mixture = Mixture((_corpus(7, 3000), _corpus(9, 9000)), (0.7, 0.3))
    sizes = {"batch": 10, "length": 5, "seed": 1}
    batches = _take(training_batches(mixture, **sizes), 6 * SEGMENT_STEPS)
    assert set(np.unique(batches)) == {7, 9}
    shares = (batches == 7).mean(axis=(1, 2))
    np.testing.assert_allclose(shares, 0.7, atol=0.11)
    assert shares.mean() == pytest.approx(0.7, abs=0.02)
    held_out = joined([_corpus(7, 30_000), _corpus(9, 90_000)], (0.5, 0.5))
    assert np.asarray(held_out.tokens[:20_000] == 7).mean() == pytest.approx(0.5, abs=0.1)
    assert held_out.num_bytes() == 60_000


@pytest.mark.slow
def test_mixtures_of_texts_train_and_hold_out_together(text, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("x" * 40 + "\n" + "y" * 40_000 + "\n" + "z" * 4_000)
    spec = f"mix:0.5*{text},0.5*text:{tmp_path}/b/*.txt"
    tokenizer, corpora = load(DataConfig(data=spec), tmp_path / "run", ("train", "valid"))
    assert tokenizer.spec == "bytes"
    assert len(corpora["train"].corpora) == 2
    batches = _take(training_batches(corpora["train"], batch=8, length=64, seed=0), 4)
    assert 0.4 <= np.isin(batches, list(b"xyz")).mean() <= 0.6
    with pytest.raises(UserError, match="a mixture needs bytes or a tokenizer that exists"):
        load(DataConfig(data=spec, tokenizer="bpe:300"), tmp_path / "other")


def _check_tokenizer(spec, tmp_path):
    """Text survives the round trip, byte counts add up, and what `save` writes can be read back."""
    content = "\n".join(_lines(50)) + "\n"
    tokenizer = train_tokenizer(spec, lambda: ())
    encoded = list(tokenizer.encode_corpus([content.encode()]))
    ids = np.concatenate([each.ids for each in encoded])
    counted = int(tokenizer.token_bytes[ids].sum()) + sum(int(each.extra[:, 1].sum()) for each in encoded)
    assert counted == len(content.encode())
    assert tokenizer.decode(tokenizer.encode("alpha beta été")) == "alpha beta été"
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.spec, again.digest) == (spec, tokenizer.digest)
    np.testing.assert_array_equal(again.encode("gamma été"), tokenizer.encode("gamma été"))


def test_a_tokenizer_json_of_others(text, tmp_path):
    learnt = train_tokenizer("bpe:300", lambda: ["\n".join(_lines(200)).encode()])
    learnt.save(tmp_path / "learnt")
    path = tmp_path / "learnt" / "tokenizer.json"
    _check_tokenizer(str(path), tmp_path)
    _, corpora = load(DataConfig(data=text, tokenizer=str(path)), tmp_path / "run", ("valid",))
    split = open_source(text, 0.1).splits["valid"]
    assert corpora["valid"].num_bytes() == sum(len(block) for block in split.blocks())


@pytest.mark.slow
def test_a_sentencepiece_model_of_others(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_lines(200)),
        model_prefix=str(tmp_path / "small"),
        vocab_size=27,
        minloglevel=2,
    )
    _check_tokenizer(str(tmp_path / "small.model"), tmp_path)


def test_a_damaged_tokenizer_is_a_line(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"--tokenizer .*bad.json: cannot be read: "):
        train_tokenizer(f"{tmp_path}/bad.json", lambda: ())


SHARD = {"tokens": 3, "bytes": 3, "digest": "x", "extra": [], "starts": [0]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokens.json", [], r"no tokens there \(.*tokens.json must be an object"),
        ("tokens.json", {"splits": {"valid": 3}, "record": 4}, "splits: valid must be a list"),
        ("tokens.json", {"splits": {"valid": ["../outside"]}, "record": 4}, "file in this folder, got '../outside"),
        ("tokens.json", {"splits": {"valid": ["/outside"]}, "record": 4}, "file in this folder, got '/outside"),
        ("tokens.json", {"splits": {"valid": ["valid-0"]}, "record": 0}, "cannot be read: .*zero"),
        ("tokens.json", {"splits": {"valid": []}, "record": 4}, "cannot be read: "),
        ("valid-0.json", {}, "valid-0.json: tokens is missing"),
        ("valid-0.json", SHARD | {"tokens": 9}, "1 records, where 3 were written"),
        ("valid-0.json", SHARD | {"extra": [[1, 2], [3]]}, "cannot be read: "),
        ("valid-0.json", SHARD | {"starts": [10**20]}, "cannot be read: "),
    ],
)  # fmt: skip
def test_files_of_shards_that_were_changed(name, content, message, tmp_path):
    train_tokenizer("bytes", lambda: iter([b""])).save(tmp_path)
    writer = ArrayRecordWriter(str(tmp_path / "valid-0.array_record"), "group_size:1")
    writer.write(b"abc")
    writer.close()
    manifest = {"splits": {"valid": ["valid-0"]}, "record": 4}
    for file, whole in (("tokens.json", manifest), ("valid-0.json", SHARD)):
        (tmp_path / file).write_text(json.dumps(content if file == name else whole))
    with pytest.raises(UserError, match=f"^--data tokens:{tmp_path}: .*{message}"):
        open_shards(tmp_path, ("valid",))
    (tmp_path / name).write_text(json.dumps(manifest if name == "tokens.json" else SHARD))
    assert bytes(open_shards(tmp_path, ("valid",))[1]["valid"].tokens) == b"abc"


@pytest.mark.parametrize("content", ["{bad", "[1]", "[" * 100_000], ids=["cut", "list", "nested"])
def test_a_record_of_the_start_that_was_changed(content, text, tmp_path):
    (tmp_path / "started.json").write_text(content)
    with pytest.raises(
        UserError, match=r"^--out: .*started.json .*; expected a new folder, or one that this"
    ):
        _tokenized(text, tmp_path)
