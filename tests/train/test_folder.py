"""Only one command at a time may train in a folder."""

import errno
import fcntl

import pytest

from tests.support.command_lines import run
from tests.support.processes import started
from tests.support.texts import write_splits
from train.engine.errors import UserError
from train.engine.folder import alone_in

HOLDER = """
import sys
from train.engine.folder import alone_in
with alone_in(sys.argv[1]):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_a_second_command_is_refused_until_the_first_one_is_gone(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs" / "a"
    text = write_splits(tmp_path, "alpha beta gamma " * 40)
    words = (
        f"--data {text} --workdir {folder} --steps 1 --batch 2 --length 16 --num_layers 1 "
        "--d_model 16 --num_heads 2 --d_ff 16 --mechanism local --tensorboard False --sample_tokens 0"
    ).split()
    holder = started("-c", HOLDER, str(folder))
    assert holder.stdout.readline() == "in\n"
    status, err = run("train.lm", words, monkeypatch, capsys)
    assert status == 2
    assert err == (f"train.lm: --workdir: another command is training in {folder}; expected another folder\n")
    assert not list(folder.iterdir())
    holder.kill()
    holder.communicate()
    status, err = run("train.lm", words, monkeypatch, capsys)
    assert status == 0, err
    assert (folder / "config.json").exists()


def test_two_contexts_of_one_process(tmp_path):
    with alone_in(str(tmp_path)):
        with (
            pytest.raises(UserError, match=f"another command is training in {tmp_path}"),
            alone_in(str(tmp_path)),
        ):
            pass
        with alone_in(str(tmp_path / "other")):
            pass
    with alone_in(str(tmp_path)):
        pass


def test_a_command_that_writes_nothing_leaves_no_folder(tmp_path):
    with alone_in(str(tmp_path / "runs" / "a")):
        assert (tmp_path / "runs" / "a").is_dir()
    assert not list(tmp_path.iterdir())
    with alone_in(str(tmp_path / "runs" / "a")):
        (tmp_path / "runs" / "b").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "b"]


def test_a_folder_without_locks_is_not_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"^--workdir: cannot write under .*/file: Not a directory$"),
        alone_in(str(tmp_path / "file")),
    ):
        pass

    def fail(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with alone_in(str(tmp_path)):
        pass
