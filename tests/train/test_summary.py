"""What a run prints about itself; the commands that it suggests work as printed."""

import importlib
import re
import shlex
import sys

import pytest

from train.engine.loop import outlook
from train.engine.metrics import as_started

TINY = "--steps 2 --batch 2 --num_layers 1 --d_model 16 --num_heads 2 --d_ff 16 --tensorboard False"


def _table(path):
    hours = (f"2020-01-{1 + i // 24:02} {i % 24:02}:00:00,{i * i % 7},{i % 5}" for i in range(300))
    path.write_text("\n".join(["date,HUFL,OT", *hours]) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("train.regression", "full-8 --pairs 4 --input_dim 2"),
        ("train.lra", "listops --length 64 --train_examples 8 --valid_examples 4 --test_examples 4 --processes 1"),
        ("train.forecast", "encoder --data {folder}/table.csv --lookback 24 --horizon 8 --split 150 50 50"),
    ],
)  # fmt: skip
def test_the_next_commands_work(module, line, tmp_path, capsys):
    _table(tmp_path / "table.csv")
    words = f"{line.format(folder=tmp_path)} {TINY}".split()
    importlib.import_module(module).main([*words, "--workdir", f"{tmp_path}/a run"])
    commands = re.findall("^next: python -m (.*)$", capsys.readouterr().err, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        name, *words = shlex.split(command)
        importlib.import_module(name).main(words)
        assert capsys.readouterr().out


def test_commands_are_named_as_this_one_was_started(monkeypatch):
    text = "next: python -m eval.lm --workdir x"
    assert as_started(text) == text
    monkeypatch.setattr(sys, "argv", ["/usr/bin/brl-train", "--steps", "1"])
    assert as_started(text) == "next: brl-eval lm --workdir x"


RISING = "learning rate: rising to the end, as --warmup_steps is 50, more than --steps"


@pytest.mark.parametrize(
    ("run", "lines"),
    [
        ((400, 401, 401, 0), ["resuming from step 400 of 401"]),
        ((400, 400, 500, 1000), ["nothing is left to train: the run is at step 400, and --steps is 400"]),
        ((400, 500, 1000, 0), ["resuming from step 400 of 500; --steps was 1000, and from here on the learning rate is "
                               "that of a run of 500 steps"]),
        ((0, 50, None, 50), []),
        ((0, 49, None, 50), [RISING]),
        ((9, 49, 49, 50), ["resuming from step 9 of 49", RISING]),
    ],
)  # fmt: skip
def test_a_run_says_how_it_goes_on(run, lines):
    assert outlook(*run) == lines
