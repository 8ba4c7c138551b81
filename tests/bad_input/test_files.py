"""Unexpected files, and too little memory: one clear line each, and nothing is damaged."""

import json
import os
import re
import shutil

import jax
import pytest

import eval.harness.runs
import train.cli.main
import train.lm
from tests.support.command_lines import last_wins, run
from tests.support.texts import write_splits
from train.data.tokenizers.named import train_tokenizer
from train.engine.checkpoint import Checkpoints, ocp
from train.engine.errors import is_memory_shortage


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a short run."""
    folder = tmp_path_factory.mktemp("trained")
    write_splits(folder, "alpha beta gamma " * 40)
    train.lm.main(line(folder))
    return folder


def line(folder):
    """The command line of the run."""
    return (
        f"--data text:{folder}/*.txt --tokenizer words --workdir {folder}/run --steps 2 --batch 2 --length 16 "
        "--num_layers 1 --d_model 16 --num_heads 2 --d_ff 16 --mechanism local --mechanism.window 4 "
        "--tensorboard False --sample_tokens 0"
    ).split()


def one_line(status, err, expected=2):
    assert status == expected, err
    assert len(err.strip().splitlines()) == 1, err
    return err


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", '{"task": ["lm"]}', "config.json: task must be a string"),
        pytest.param("config.json", DEEP, "config.json is not JSON: nested too deep", id="deep"),
        ("data.json", "[]", "data.json must be an object"),
        ("data.json", "{}", "data.json: data is missing"),
        ("data.json", DEEP, "data.json is not JSON: nested too deep"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json must be an object"),
        (
            "vocab.txt",
            "<eos>\n<unk>\nalpha\n",
            "its files are not those that were saved: the vocabulary had 5 tokens",
        ),
    ],
)
def test_a_file_of_a_run_that_was_changed(file, content, message, trained, tmp_path, monkeypatch, capsys):
    shutil.copytree(trained / "run", tmp_path / "run")
    (tmp_path / "run" / file).write_text(content)
    before = sorted(tmp_path.rglob("*"))
    err = one_line(*run("eval.lm", ["--workdir", str(tmp_path / "run")], monkeypatch, capsys))
    assert re.search(message, err), err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_tokenizer_of_another_run(trained, tmp_path, monkeypatch, capsys):
    """All of its files, which agree with each other."""
    shutil.copytree(trained / "run", tmp_path / "run")
    train_tokenizer("words", lambda: iter([b"alpha beta"])).save(tmp_path / "run")
    for command, words in (
        ("eval.lm", ["--workdir", str(tmp_path / "run")]),
        ("train.lm", [*line(trained), "--workdir", str(tmp_path / "run")]),
    ):
        err = one_line(*run(command, last_wins(words), monkeypatch, capsys))
        assert (
            "is not the one that the run was started with; its vocabulary had 5 tokens, this one has 4" in err
        )


def test_a_cache_that_another_machine_names(trained, tmp_path, monkeypatch, capsys):
    """Evaluation makes no folder that only config.json names."""
    shutil.copytree(trained / "run", tmp_path / "run", ignore=shutil.ignore_patterns("tokens-*"))
    path = tmp_path / "run" / "config.json"
    values = json.loads(path.read_text())
    values["data"]["cache_dir"] = f"{tmp_path}/elsewhere"
    path.write_text(json.dumps(values))
    status, err = run("eval.lm", ["--workdir", str(tmp_path / "run")], monkeypatch, capsys)
    assert status == 0, err
    assert f"names the cache {tmp_path}/elsewhere, which is not on this machine; another is used" in err
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train.forecast", "encoder --data {pipe}"),
        ("train.graph", "acm-gcn --data_dir {pipe}"),
        ("train.lra", "image --data_dir {pipe}"),
        ("train.lm", "--data text:{pipe}"),
        ("train.lm", "--tokenizer {pipe}"),
        ("train.copy", "--data_dir {folder}"),
        ("eval.generate", "--workdir {run} --prompt_file {pipe}"),
        ("eval.generate", "--workdir {run} --batch {pipe} --out {run}/out.jsonl"),
        ("eval.lm", "--workdir {folder}"),
    ],
)
def test_pipes(command, words, trained, tmp_path, monkeypatch, capsys):
    """Reading one would wait for ever."""
    for name in ("config.json", "tokenizer.json", "train.jsonl", "valid.jsonl", "test.jsonl"):
        os.mkfifo(tmp_path / name)
    line = words.format(pipe=tmp_path / "tokenizer.json", folder=tmp_path, run=trained / "run").split()
    if command.startswith("train"):
        line += ["--workdir", str(tmp_path / "run")]
    one_line(*run(command, line, monkeypatch, capsys))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_width(trained, tmp_path, monkeypatch, capsys):
    """It is not damaged: config.json describes another configuration."""
    shutil.copytree(trained / "run", tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    values = json.loads(path.read_text())
    values["model"]["d_model"] = 32
    path.write_text(json.dumps(values))
    for checkpoint in ("best", "last"):
        words = ["--workdir", str(tmp_path / "run"), "--checkpoint", checkpoint]
        err = one_line(*run("eval.lm", words, monkeypatch, capsys))
        assert "is of another configuration than config.json: d_model 16 -> 32" in err
        assert "damaged" not in err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("bad allocation"),
        MemoryError(),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 506880336 bytes."),
        jax.errors.JaxRuntimeError(
            "INTERNAL: Error dispatching computation: Out of memory allocating 6400 bytes."
        ),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_too_little_memory(error, trained, monkeypatch, capsys):
    """It gives one line wherever it occurs, and does not make a checkpoint count as damaged."""
    assert is_memory_shortage(error)
    before = sorted(path.name for path in (trained / "run").rglob("*"))

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(train.cli.main, "train", fail)
        status, err = run("train.lm", line(trained), patch, capsys)
    assert status == 1
    assert err.splitlines()[-1].startswith("train.lm: out of memory: ")
    with monkeypatch.context() as patch:
        patch.setattr(ocp.Checkpointer, "restore", fail)
        status, err = run("train.lm", line(trained), patch, capsys)
        assert status == 1
        assert "train.lm: out of memory while reading checkpoint" in err.splitlines()[-1]
        assert "out of memory" in one_line(*run("eval.lm", ["--workdir", f"{trained}/run"], patch, capsys), 1)
    assert sorted(path.name for path in (trained / "run").rglob("*")) == before
    assert Checkpoints(trained / "run" / "checkpoints").steps() == [2]
    assert eval.harness.runs.open_run([train.lm.LM], str(trained / "run"), "last").step == 2
