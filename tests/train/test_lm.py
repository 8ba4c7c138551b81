"""The commands as a user runs them, on a tiny text."""

import contextlib
import dataclasses
import io
import json
import math
import re
import shlex
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eval.tasks.generate
import eval.tasks.lm
import train.lm
from eval.harness.runs import open_run
from tests.support.command_lines import last_wins
from tests.support.command_lines import run as command
from tests.support.logs import metrics_lines
from tests.support.processes import python
from train.data.corpus import Corpus
from train.data.dataset import load
from train.data.tokenizers.named import train_tokenizer
from train.engine.errors import UserError
from train.tasks.lm import LM, LmData, held_out_stream
from train.tasks.lm_config import PRESETS

# Keep these tests in one process, which shares the runs and compiled programs. Subprocesses compile for themselves.
pytestmark = pytest.mark.xdist_group("train.lm")

TINY = (
    "--steps 8 --batch 4 --accumulation 2 --length 16 --num_layers 1 --d_model 16 --num_heads 2 --d_ff 16 "
    "--dropout 0.2 --eval_every 4 --eval_tokens 200 --checkpoint_every 3 --warmup_steps 2 --sample_tokens 5 "
    "--tokenizer bytes"
)
# The paper's beta adds one matrix that the default lacks.
BRL = (
    "--mechanism.window 4 --mechanism.num_compressed 2 --mechanism.block_size 8 --mechanism.history_size 8 "
    "--mechanism.beta 0.5"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a short text in three splits."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    for split, count in (("train", 600), ("valid", 90), ("test", 60)):
        lines = [" ".join(rng.choice(words, size=6)) for _ in range(count // 6)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def _argv(text, workdir, *more, mechanism=BRL):
    line = f"--workdir {workdir} --data text:{text}/*.txt {TINY} {mechanism}"
    return last_wins([*line.split(), *more])


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A finished run's folder, and its stdout and stderr."""
    workdir = tmp_path_factory.mktemp("run")
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        train.lm.main(_argv(text, workdir))
    return workdir, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def run(finished):
    """A finished run's folder."""
    return finished[0]


def _json(capsys, *argv):
    eval.tasks.lm.main(argv)
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_run_leaves_what_it_should(run):
    names = {path.name for path in run.iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "checkpoints", "tokenizer_config.json"}
    assert any(name.startswith("events.out.tfevents") for name in names)
    lines = metrics_lines(run)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["step"] for line in lines if "val_loss" in line] == [4, 8]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert json.loads((run / "config.json").read_text())["model"]["vocab_size"] == 256


def test_a_run_says_what_it_is_and_what_came_out(finished, capsys):
    """The commands that it suggests work as printed."""
    workdir, _, err = finished
    lines = err.splitlines()
    params = open_run([LM], str(workdir), "last").params
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert lines[0] == f"model: brl, layers 1 x 16, {parameters:,} parameters"
    assert lines[1].startswith(f"devices: {jax.device_count()} (cpu), mesh: ")
    assert re.fullmatch(
        r"data: text:.*/\*\.txt as bytes, [\d,]+ tokens train, 5\d\d tokens valid", lines[2]
    ), lines[2]
    assert lines[3] == f"training: 8 steps of 64 tokens (4 rows), in {workdir}"
    last = metrics_lines(workdir)[-1]
    measured = f"loss {last['val_loss']:.4f}, perplexity {math.exp(last['val_loss']):.4f}"
    measured += f", bits per byte {last['val_bits_per_byte']:.4f}"
    assert re.fullmatch(f"done: 8 steps in {workdir}, \\d+:\\d\\d:\\d\\d; held-out {measured}", lines[-3])
    evaluation, generation = (shlex.split(line.removeprefix("next: python -m ")) for line in lines[-2:])
    assert evaluation[0] == "eval.lm"
    result = _json(capsys, *evaluation[1:])
    assert result["step"] == 8
    assert result["loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(last["val_bits_per_byte"], rel=1e-6)
    assert result["perplexity"] == pytest.approx(np.exp(result["loss"]))
    # Each target is one byte, and every byte but the first is a target.
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / np.log(2))
    assert generation[0] == "eval.generate"
    eval.tasks.generate.main([*generation[1:], "--tokens", "3"])
    assert capsys.readouterr().out.startswith("The ")


def test_the_sample_goes_to_stdout(text, finished):
    prompt, continuation = finished[1].split("\n--- what the network adds:\n")
    assert prompt == (text / "valid.txt").read_text()[:64]
    assert len(continuation) > 1


@pytest.mark.parametrize(
    ("data", "chosen", "proposed"),
    [("stdlib", "", "def "), ("text:x", "", "The "), ("stdlib", "import", "import")],
)
def test_the_proposed_prompt_suits_the_text(data, chosen, proposed):
    config = dataclasses.replace(PRESETS["small"], sample_prompt=chosen)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, data=data))
    tokenizer = train_tokenizer("bytes", lambda: iter([b""]))
    commands = LM.next_commands(config, LmData(tokenizer, {}, tokenizer.encode("held out")))
    assert commands[1][-2:] == ("--prompt", proposed)


def test_the_second_interrupt_ends_the_process_at_once():
    code = (
        "import signal, time\nfrom train.engine.signals import Signals\n"
        "with Signals():\n signal.raise_signal(signal.SIGINT)\n print('first', flush=True)\n"
        " signal.raise_signal(signal.SIGINT)\n print('second', flush=True)"
    )
    done = python("-c", code)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "first\n"
    assert "saving; Ctrl-C again stops at once" in done.stderr
    assert "Traceback" not in done.stderr


def test_eval_against_the_models_own_logits(text, run, tmp_path, capsys):
    """Computes the loss from the logits of the test text without the loop's code; as another text it has the same."""
    result = _json(capsys, "--workdir", str(run), "--split", "test", "--checkpoint", "last")
    shutil.copy(text / "test.txt", tmp_path / "valid.txt")
    other = _json(
        capsys, "--workdir", str(run), "--data", f"text:{tmp_path}/valid.txt", "--checkpoint", "last"
    )
    assert (other["loss"], other["tokens"]) == (result["loss"], result["tokens"])
    content = (text / "test.txt").read_bytes()
    assert result["tokens"] == len(content) - 1
    _, config, model, params, _ = open_run([LM], str(run), "last")
    tokens = np.frombuffer(content, np.uint8).astype(np.int32)
    rows, targets = 2, len(tokens) - 1
    row = -(-targets // rows)
    total, memory = 0.0, model.init_memory(rows)
    forward = jax.jit(lambda tokens, memory: model.apply({"params": params}, tokens, memory=memory))
    for start in range(0, row, config.loop.length):
        at = np.arange(rows)[:, None] * row + start + np.arange(config.loop.length)
        real = (start + np.arange(config.loop.length) < row)[None] & (at < targets)
        at = np.where(real, at, 0)
        inputs = np.where(real, tokens[at], 0)
        logits, memory = forward(jnp.asarray(inputs), memory)
        logits = np.asarray(logits, np.float64)
        chosen = np.take_along_axis(logits, tokens[np.minimum(at + 1, targets)][..., None], -1)[..., 0]
        total += ((np.log(np.exp(logits).sum(-1)) - chosen) * real).sum()
    assert result["loss"] == pytest.approx(total / targets, rel=1e-5)


@pytest.mark.slow
def test_a_sample_that_a_mechanism_is_too_short_for(text, tmp_path, capsys):
    mechanism = "--mechanism cosformer --mechanism.max_length 64"
    train.lm.main(_argv(text, tmp_path, "--steps", "2", "--sample_tokens", "80", mechanism=mechanism))
    assert "no sample of 80 tokens: max_length=64 of the cosformer mechanism" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"--tokens: max_length=64 of the cosformer mechanism"):
        eval.tasks.generate.main(["--workdir", str(tmp_path), "--prompt", "ab", "--tokens", "80"])


def test_generation(run, capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text("gamma ")
    line = ["--workdir", str(run), "--tokens", "7", "--prompt", "alpha", "--prompt", "be"]
    line += ["--prompt_file", str(tmp_path / "prompt.txt")]
    eval.tasks.generate.main(line)
    out = capsys.readouterr().out
    for i, prompt in enumerate(("alpha", "be", "gamma ")):
        assert f"--- {i + 1} of 3\n{prompt}" in out
    eval.tasks.generate.main(line)
    assert capsys.readouterr().out == out
    eval.tasks.generate.main([*line, "--seed", "1"])
    assert capsys.readouterr().out != out


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        ("eval.lm", "--checkpoint 7", "--checkpoint.*one of best, last.*7"),
        ("eval.lm", "--split train", "train.*--split.*valid"),
        ("eval.lm", "--data text:{new}/*", "--data.*no file"),
        ("eval.generate", "", "--prompt.*expected a text"),
        ("eval.generate", "--prompt=", "--prompt.*at least one token"),
        ("eval.generate", "--prompt a --top_p 2", "--top_p.*got 2.0"),
        ("eval.generate", "--prompt_file {new}", "--prompt_file.*{new}"),
    ],
)
def test_bad_input_is_a_line_and_status_2(monkeypatch, capsys, tmp_path, finished, module, options, message):
    new = tmp_path / "new"
    words = ["--workdir", str(finished[0]), *options.format(new=new).split()]
    status, err = command(module, words, monkeypatch, capsys)
    assert status == 2
    assert re.fullmatch(f"{module}: .*{message.format(new=new)}.*\n", err), err
    assert not new.exists()


def test_a_prompt_outside_the_vocabulary(text, tmp_path):
    for prompt, message in (
        ("zeta", r"--sample_prompt.*zeta"),
        (" ", "--sample_prompt: expected at least one token of text, got ' '"),
    ):
        with pytest.raises(UserError, match=message):
            train.lm.main(_argv(text, tmp_path, "--tokenizer", "words:max=4", "--sample_prompt", prompt))


def test_held_out_rows_are_no_shorter_than_a_batch(text, tmp_path):
    """A short held-out text in many rows would leave most tokens almost without context."""
    config = PRESETS["small"]
    data = dataclasses.replace(config.data, data=f"text:{text}/valid.txt")
    _, corpora = load(data, tmp_path, ("valid",))
    batch = next(iter(held_out_stream(corpora["valid"], config, 0)))
    assert batch["tokens"].shape == (max(1, len(corpora["valid"].tokens) // 512), 512)
    assert held_out_stream(corpora["valid"], config, 5).num_targets == 4
    # Few enough rows that a memory is carried across batches, also if only part of the text is read.
    text = np.zeros(4096, np.uint8)
    corpus = Corpus(text, np.ones(256, np.int64), np.zeros((0, 2), np.int64), "zeros")
    config = dataclasses.replace(config, loop=dataclasses.replace(config.loop, batch=16, length=64))
    assert [held_out_stream(corpus, config, limit).batch for limit in (0, 4096, 2048, 300, 100)] == [
        16,
        16,
        8,
        1,
        1,
    ]
