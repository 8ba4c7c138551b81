"""Copying: pairs checked against their definition, files of texts, and the commands as a user runs them."""

import json

import numpy as np
import pytest

import eval.tasks.copy
import train.copy
from eval.harness.groups import by_network, compared
from tests.support.command_lines import config_of, last_wins
from tests.support.texts import write_lines
from train.data.copying import CopyDataConfig, HeldOutPairs, PairStream, draw_pairs, load_pairs
from train.data.drawn import HeldOutDrawn
from train.engine.errors import UserError
from train.tasks.copy import COPY

TINY = (
    "--length 12 --valid_rows 10 --test_rows 6 --num_layers 1 --encoder_layers 1 "
    "--d_model 16 --num_heads 2 --d_ff 16 --batch 8 --warmup_steps 2 --tensorboard False"
)
SYMBOLS = "--min_length 3 --vocabulary 6"  # of drawn pairs; pairs of texts have their own
PAIRS = [("one two", "eno owt"), ("a", "a"), ("three", "eerht"), ("four", "ruof"), ("x y", "y x")]


@pytest.mark.parametrize("order", ["copy", "reverse", "sort"])
def test_pairs_follow_their_definition(order):
    config = CopyDataConfig(order=order, vocabulary=5, length=(9,), min_length=2)
    batch = draw_pairs(config, 9, (0, 1), 60)
    begin, end = 5, 6
    lengths = batch["source_lengths"].tolist()
    assert set(lengths) == set(range(2, 10))
    for row, length in enumerate(lengths):
        source = batch["source"][row].tolist()
        target = {"copy": list, "reverse": lambda x: x[::-1], "sort": sorted}[order](source[:length])
        padding = [0] * (9 - length)
        assert source[length:] == padding
        assert batch["tokens"][row].tolist() == [begin, *target, *padding]
        assert batch["targets"][row].tolist() == [*target, end, *padding]
        assert batch["weights"][row].tolist() == [1.0] * (length + 1) + [0.0] * (9 - length)
    assert set(batch["source"].reshape(-1).tolist()) == set(range(5))


def test_lengths_are_exact_where_asked_for():
    held_out = list(HeldOutDrawn(CopyDataConfig(length=(10, 3), min_length=10, valid_rows=5), batch=3))
    assert [b["source_lengths"].tolist() for b in held_out] == [[10] * 3] * 2 + [[3] * 3] * 2
    assert [b["weights"].any(axis=1).sum() for b in held_out] == [3, 2, 3, 2]


def write_pairs(folder, count=20):
    lines = [json.dumps({"source": s, "target": t, "id": 1}) for s, t in PAIRS * (count // len(PAIRS))]
    write_lines(folder / "train.jsonl.gz", lines)
    write_lines(folder / "valid.jsonl", lines[:5])
    write_lines(folder / "test.jsonl", ["", *lines[:7]])


def test_texts_become_pairs(tmp_path):
    """Each pass has every pair once, unchanged, in one row; a text that is too long is cut at the end."""
    write_pairs(tmp_path / "data")
    config = CopyDataConfig(data_dir=str(tmp_path / "data"), length=(3, 6))
    assert config.buckets == (5, 8)
    data = load_pairs(config, str(tmp_path / "run"), ("train", "valid", "test"))
    assert {split: len(examples) for split, examples in data.examples.items()} == {
        "train": 20, "valid": 5, "test": 7
    }  # fmt: skip
    begin, end = 256, 257
    found = []
    for batch in HeldOutPairs(data.examples["test"], batch=4, buckets=config.buckets):
        width = batch["source"].shape[1]
        assert batch["targets"].shape == batch["tokens"].shape == (4, width - 1)
        for row in range(4):
            counted = int(batch["weights"][row].sum())
            if not counted:
                continue
            source = bytes(batch["source"][row, : batch["source_lengths"][row]].astype(np.uint8)).decode()
            target = batch["targets"][row, :counted].tolist()
            assert batch["tokens"][row, :counted].tolist() == [begin, *target[:-1]]
            found.append((source, target))
    texts = [(s[:6], [*t.encode(), end][: 6 if len(t) > 6 else 7]) for s, t in (PAIRS * 2)[:7]]
    assert sorted(found) == sorted(texts)
    batch = next(PairStream(data.examples["train"], batch=4, buckets=config.buckets, seed=1))
    shapes = COPY.batch_shapes(config_of(COPY, "copy-full --data_dir x --length 6"), 4)
    assert {name: x.shape[0] for name, x in batch.arrays.items()} == {
        name: x.shape[0] for name, x in shapes.items()
    }
    # The run's tokenizer is read back and must match the requested one.
    again = load_pairs(config, str(tmp_path / "run"), ("test",))
    assert again.examples["test"].digest == data.examples["test"].digest
    other = CopyDataConfig(data_dir=config.data_dir, tokenizer="chars")
    with pytest.raises(UserError, match=r"--tokenizer: the run in .* was started with 'bytes', got 'chars'"):
        load_pairs(other, str(tmp_path / "run"), ("test",))


@pytest.mark.parametrize("tokenizer", ["words", "words:2", "words:max=4", "chars:9"])
def test_words_and_characters_that_training_lacks_have_a_token(tokenizer, tmp_path):
    write_pairs(tmp_path / "data")
    write_lines(tmp_path / "data" / "valid.jsonl", ['{"source": "a Ω new", "target": "a x"}'])
    config = CopyDataConfig(data_dir=str(tmp_path / "data"), tokenizer=tokenizer)
    data = load_pairs(config, str(tmp_path / "run"), ("train", "valid"))
    batch = next(iter(HeldOutPairs(data.examples["valid"], batch=1, buckets=config.buckets)))
    source = batch["source"][0, : batch["source_lengths"][0]]
    shown = data.tokenizer.decode(source)
    assert "\ufffd" in shown if tokenizer.startswith("chars") else "<unk>" in shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"source": "a", "target": " "}', r'expected a text "target", got an empty one'),
        ('{"source": "", "target": "b"}', r'expected a text "source", got an empty one'),
        ('{"source": "a"}', "target is missing"),
        ('{"source": 3, "target": "b"}', "source must be a string, got 3"),
        ('["a", "b"]', "the line must be an object"),
        ("a\tb", "the line is not JSON"),
        pytest.param("[" * 100_000, "the line is not JSON", id="nested"),
        ('{"source": "\\ud800", "target": "b"}', 'expected Unicode in "source"'),
    ],
)
def test_bad_lines_are_named(line, message, tmp_path):
    write_pairs(tmp_path / "data")
    write_lines(tmp_path / "data" / "valid.jsonl", ['{"source": "a", "target": "b"}', "", line])
    with pytest.raises(UserError, match=rf"^--data_dir: .*valid\.jsonl, line 3: {message}"):
        run(tmp_path / "run", f"--data_dir {tmp_path / 'data'}")
    assert not (tmp_path / "run").exists()


def test_missing_and_empty_files(tmp_path):
    config = CopyDataConfig(data_dir=str(tmp_path))
    with pytest.raises(
        UserError, match=r"--data_dir: expected .*train\.jsonl or train\.jsonl\.gz; there is neither"
    ):
        load_pairs(config, str(tmp_path / "run"), ("train",))
    write_lines(tmp_path / "train.jsonl", [])
    with pytest.raises(UserError, match=r"--data_dir: expected pairs in .*train\.jsonl, got none"):
        load_pairs(config, str(tmp_path / "run"), ("train",))


def run(workdir, more=""):
    drawn = "" if "--data_dir" in more else SYMBOLS
    line = (
        f"copy-full --workdir {workdir} {TINY} {drawn} --steps 6 --eval_every 3 --checkpoint_every 2 {more}"
    )
    train.copy.main(last_wins(line))


@pytest.mark.slow
def test_measuring_and_the_table(tmp_path, capsys):
    run(tmp_path / "runs/a")
    run(tmp_path / "runs/b", "--cross_window 4 --seed 1")
    capsys.readouterr()
    eval.tasks.copy.main(["--workdir", str(tmp_path / "runs/a"), "--length", "5"])
    (case,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    assert (case["length"], case["rows"]) == (5, 6)
    assert 0 <= case["sequence_accuracy"] <= case["token_accuracy"] < 0.9
    assert not (tmp_path / "runs/a/copy_test.json").exists()
    picture = tmp_path / "copy.png"
    eval.tasks.copy.main(["--table", str(tmp_path / "runs"), "--picture", str(picture)])
    text = capsys.readouterr().out
    assert "| 12 | 24 | 48 |" in text
    assert "| full, cross_window 4 |" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "runs/a/copy_test.json").read_text())["trained"] == 12
    with pytest.raises(UserError, match="--source: expected a run on pairs of texts"):
        eval.tasks.copy.main(["--workdir", str(tmp_path / "runs/a"), "--source", "1 2"])


@pytest.mark.slow
def test_texts_as_a_user_runs_them(tmp_path, capsys):
    """Trains until the model knows its pairs by heart; it then writes them, and the measurements agree."""
    write_pairs(tmp_path / "data")
    workdir = tmp_path / "run"
    line = (
        f"copy-full --workdir {workdir} {TINY} --data_dir {tmp_path / 'data'} --steps 300 --eval_every 300 "
        "--d_model 32 --learning_rate 1e-2"
    )
    train.copy.main(last_wins(line))
    capsys.readouterr()
    eval.tasks.copy.main(["--workdir", str(workdir)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sum(case["rows"] for case in result["cases"]) == 7
    assert all(case["sequence_accuracy"] == case["token_accuracy"] == 1.0 for case in result["cases"])
    eval.tasks.copy.main(["--workdir", str(workdir), "--source", "three", "x y"])
    written = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert written["target"] == ["eerht", "y x"]
    for options, message in (
        (["--length", "3"], "--length: expected a run on symbols"),
        (["--source", ""], "--source"),
    ):
        with pytest.raises(UserError, match=message):
            eval.tasks.copy.main(["--workdir", str(workdir), *options])
    with pytest.raises(UserError, match="--source must be given with workdir, not with table"):
        eval.tasks.copy.main(["--table", str(tmp_path), "--source", "three"])


def test_only_what_is_right_at_its_place_counts(monkeypatch):
    """A target that continues past its end is wrong as a whole; padding rows don't count."""
    targets = np.array([[1, 2, 7, 0], [3, 3, 3, 7], [4, 7, 0, 0], [1, 1, 1, 7]])
    weights = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    written = np.array([[1, 2, 7, 0], [3, 0, 3, 7], [4, 4, 7, 0], [1, 1, 1, 7]])
    monkeypatch.setattr(eval.tasks.copy, "write_targets", lambda *_: written)
    batch = {"targets": targets, "weights": weights, "source": None, "source_lengths": None}
    (case,) = eval.tasks.copy.measure_batches(None, [batch])
    assert case == {"length": 3, "token_accuracy": 7 / 9, "sequence_accuracy": 1 / 3, "rows": 3}


def test_an_encoder_of_another_mechanism():
    line = "--mechanism deltanet --encoder_mechanism local --encoder_mechanism.window 6"
    with pytest.raises(UserError, match="no bidirectional form"):  # before the error about the encoder's
        config_of(COPY, "copy-full --mechanism deltanet")
    model = config_of(COPY, line, "copy-full").model
    assert (type(model.mechanism).__name__, model.encoder.mechanism.window) == ("DeltaNetConfig", 6)


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ("", "local"),
        ("--late_mechanism full", "local + full"),
        ("--encoder_mechanism linformer", "linformer to local"),
        ("--encoder_mechanism linformer --late_mechanism full", "linformer to local + full"),
    ],
)
def test_a_row_of_the_table_names_each_mechanism_once(options, label):
    argv = last_wins(f"--num_layers 2 --mechanism local {options}")
    config = config_of(COPY, argv, "copy-full")
    assert list(by_network([{"configuration": compared(COPY, config)}])) == [label]
