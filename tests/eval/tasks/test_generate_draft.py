"""`eval.generate --draft`: a second run drafts tokens for the first."""

import sys

import pytest

import eval.tasks.generate
import train.lm
from tests.support.command_lines import last_wins
from tests.support.texts import write_splits
from train.cli.command import command

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("eval.generate_draft")]

SIZES = "--num_layers 1 --d_model 16 --num_heads 2 --d_ff 16 --steps 1 --batch 2 --length 8 --eval_tokens 20"
RUNS = {
    "large": "--mechanism full --d_model 32",
    "segments": "--mechanism brl --mechanism.memory output --mechanism.block_size 4",
    "characters": "--mechanism full --tokenizer chars",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of runs of one step each."""
    place = tmp_path_factory.mktemp("runs")
    text = write_splits(place, "a text of a few words\n" * 40)
    for name, options in RUNS.items():
        line = f"{SIZES} --tokenizer bytes --data {text} --sample_tokens 0 --tensorboard False"
        train.lm.main(last_wins(f"{line} {options} --workdir {place}/{name}"))
    return place


def generated(runs, capsys, line):
    eval.tasks.generate.main(f"--workdir {runs}/large --temperature 0 --tokens 10 {line}".split())
    return capsys.readouterr()


def test_a_draft_that_is_always_right_gives_all_its_tokens(runs, capsys):
    """Four drafted tokens and one more in each call."""
    _, err = generated(runs, capsys, f"--prompt text --draft {runs}/large")
    assert err.splitlines()[-1].endswith("10 tokens in 2 calls of the model, 5.00 a call")
    _, err = generated(runs, capsys, f"--prompt text --draft {runs}/large --draft_tokens 1")
    assert err.splitlines()[-1].endswith("10 tokens in 5 calls of the model, 2.00 a call")


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (
            "characters",
            "--draft: expected the tokenizer of {runs}/large, got another one in {runs}/characters",
        ),
        ("segments", "--draft: mechanism brl cannot go back"),
        ("none", "--draft: no run there"),
    ],
)
def test_a_draft_that_does_not_fit_is_a_line_and_status_2(runs, monkeypatch, capsys, draft, expected):
    line = f"--workdir {runs}/large --prompt text --tokens 4 --draft {runs}/{draft}"
    monkeypatch.setattr(sys, "argv", ["name", *line.split()])
    assert command(eval.tasks.generate.main, "name") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    assert expected.format(runs=runs) in err
