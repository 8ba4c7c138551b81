"""Runs that start from a trained network with other attention: --convert_from and --match_steps."""

import contextlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

import eval.tasks.lm
import train.lm
import train.recall
import train.tokenize
from brl_jax.loading import load_run
from brl_jax.models import huggingface
from eval.harness.runs import open_run
from tests.support.command_lines import config_of, last_wins
from tests.support.command_lines import run as command
from tests.support.logs import metrics_lines
from tests.support.runs import untrained
from tests.support.texts import write_splits
from train.data.tokenizers.named import load_tokenizer
from train.tasks.conversion import matching_objective
from train.tasks.lm import LM, LM_MATCHING
from train.tasks.recall import RECALL

pytest.importorskip("safetensors")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("train.converting")]

SHORT = (
    "--steps 1 --batch 4 --length 32 --eval_every 100 --checkpoint_every 100 --warmup_steps 2 --sample_tokens 0 "
    "--learning_rate 1e-2 --eval_tokens 0 --tensorboard False"
)
SIZES = "--num_layers 2 --d_model 32 --num_heads 4 --d_ff 48 --mechanism full"
BRL = "--mechanism brl --mechanism.window 8 --mechanism.num_compressed 4 --mechanism.history_size 16"
CONVERTED = f"{BRL} --match_steps 60 --steps 40 --checkpoint_every 20 --convert_from"


def words(text, workdir, *more):
    return last_wins(f"--workdir {workdir} --data {text} {SHORT} {' '.join(map(str, more))}")


@pytest.fixture(scope="module")
def teacher(text, tmp_path_factory):
    """A run with full attention and its own tokenizer."""
    workdir = tmp_path_factory.mktemp("teacher") / "run"
    train.lm.main(words(text, workdir, SIZES, "--tokenizer bpe:300 --steps 40"))
    return workdir


@pytest.fixture(scope="module")
def run(teacher, text, tmp_path_factory):
    """A converted run, whose teacher is gone."""
    workdir, copy = tmp_path_factory.mktemp("run") / "run", tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(teacher, copy)
    train.lm.main(words(text, workdir, CONVERTED, copy))
    shutil.rmtree(copy)
    return workdir


@contextlib.contextmanager
def at_its_place(teacher, run):
    """Puts the teacher back for as long as the matching needs it."""
    place = json.loads((run / "matching" / "config.json").read_text())["convert_from"]
    shutil.copytree(teacher, place)
    yield place
    shutil.rmtree(place)


def params_of(workdir, checkpoint="last"):
    return traverse_util.flatten_dict(
        jax.device_get(open_run([LM], str(workdir), checkpoint).params), sep="/"
    )


def test_matching_brings_the_layers_nearer_and_moves_them_alone(run, teacher):
    lines = metrics_lines(run / "matching")
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert lines[-1]["val_loss"] < lines[0]["loss"] / 2
    with at_its_place(teacher, run):
        params = jax.device_get(open_run([LM_MATCHING], str(run / "matching"), "last").params)
    both = traverse_util.flatten_dict(params, sep="/")
    trained = params_of(teacher, "best")
    assert {name for name in both if name.startswith("teacher/")} == {f"teacher/{name}" for name in trained}
    for name, value in trained.items():
        np.testing.assert_array_equal(both[f"teacher/{name}"], value)
    with pytest.raises(ValueError, match=r"network must be one of DecoderLM, .* got 'TrainedAndNew'"):
        load_run(run / "matching")
    moved = both["student/stack/layers_0/block_0/mixer/local/query/kernel"]
    assert not np.array_equal(moved, trained["stack/layers_0/block_0/mixer/query/kernel"])


def test_a_run_goes_on_from_the_matched_layers(run, teacher, capsys):
    """It learns, and needs its teacher no more."""
    lines = metrics_lines(run)
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert lines[0]["loss"] < 2 < metrics_lines(teacher)[0]["loss"]
    capsys.readouterr()
    train.lm.main(["--workdir", str(run)])
    assert "nothing is left to train: the run is at step 40" in capsys.readouterr().err
    eval.tasks.lm.main(["--workdir", str(run), "--checkpoint", "last"])
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert measured["loss"] == pytest.approx(lines[-1]["val_loss"], rel=1e-5)


def test_the_same_mechanism_goes_on_as_the_teacher_on_other_text(teacher, tmp_path, monkeypatch, capsys):
    """Its first loss is the teacher's, by the teacher's tokenizer; tokens of another tokenizer are refused."""
    other = write_splits(tmp_path, "other words altogether, not about skies\n" * 60)
    train.lm.main(words(other, tmp_path / "run", "--mechanism full --convert_from", teacher))
    tokenizers = [load_tokenizer(place) for place in (teacher, tmp_path / "run")]
    assert tokenizers[0].digest == tokenizers[1].digest
    opened, config = (
        open_run([LM], str(teacher), "best"),
        open_run([LM], str(tmp_path / "run"), "last").config,
    )
    objective, data = LM.objective(opened.model, opened.config), LM.load(config, ("train", "valid"))
    batch = next(iter(LM.training_stream(config, data, LM.open_mesh(config))))
    sums = jax.jit(lambda params, batch: objective.sums(params, None, batch, None)[0])(
        opened.params, batch.arrays
    )
    first = metrics_lines(tmp_path / "run")[0]["loss"]
    np.testing.assert_allclose(first, sums["loss"] / sums["weight"], rtol=1e-6)
    train.tokenize.main(["--data", other, "--tokenizer", "bpe:300", "--out", f"{tmp_path}/tokens"])
    line = words(f"tokens:{tmp_path}/tokens", tmp_path / "refused", BRL, "--convert_from", teacher)
    status, err = command("train.lm", line, monkeypatch, capsys)
    assert status == 2
    assert f"--convert_from: {teacher} has another tokenizer than tokens:" in err


def check_equal_runs(folder, run):
    for part in (".", "matching"):
        losses = [[x["loss"] for x in metrics_lines(place / part)] for place in (folder, run)]
        assert losses[0] == losses[1]
    jax.tree.map(np.testing.assert_array_equal, params_of(folder), params_of(run))


def test_a_run_stopped_in_the_matching_goes_on(teacher, text, tmp_path, run):
    """Bit for bit."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for name in ("checkpoints", "matching/checkpoints/60"):
        shutil.rmtree(folder / name)
    for name in ("config.json", "metrics.jsonl"):  # written after the matching
        (folder / name).unlink()
    with at_its_place(teacher, run) as place:
        train.lm.main(words(text, folder, CONVERTED, place))
    check_equal_runs(folder, run)


def test_a_folder_of_transformers(folder, text, tmp_path):
    """Half of its layers stay, with their parameters and without a gradient, and the tokenizer is its own."""
    line = words(
        text,
        tmp_path / "run",
        "--mechanism linear --late_mechanism full --schedule alternate --convert_from",
        folder,
        "--match_steps 8 --learning_rate 1e-30 --weight_decay 0 --warmup_steps 0",
    )
    train.lm.main(line)
    config, trained = huggingface.load(folder)
    opened = open_run([LM], str(tmp_path / "run"), "last")
    assert opened.config.model.norm == config.norm == "rms"
    assert opened.config.model.vocab_size == 304
    assert opened.config.model.late_mechanism == config.mechanism
    ours, theirs = opened.params["stack"], trained["stack"]["layers_0"]["block_0"]
    stayed = jax.tree.map(lambda x: x[1], theirs)
    jax.tree.map(
        np.testing.assert_array_equal, jax.tree.map(lambda x: x[0], ours["layers_1"]["block_0"]), stayed
    )
    first = ours["layers_0"]["block_0"]
    np.testing.assert_array_equal(
        first["feed_forward"]["up"]["kernel"][0], theirs["feed_forward"]["up"]["kernel"][0]
    )
    lines = metrics_lines(tmp_path / "run" / "matching")
    assert lines[-1]["loss"] < lines[0]["loss"]
    matching = open_run([LM_MATCHING], str(tmp_path / "run" / "matching"), "last")
    objective = matching_objective(matching.config)
    batch = {"tokens": jnp.arange(64).reshape(2, 32)}
    grads = jax.jit(jax.grad(lambda p: objective.loss(p, None, batch, None)[0]))(matching.params)
    assert objective.split(matching.params)[0].keys() == {"student"}
    student = grads["student"]["stack"]
    assert any(np.asarray(x).any() for x in jax.tree.leaves(student["layers_0"]))
    for still in (student["layers_1"], grads["teacher"]):
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(still))


def test_recall_is_converted_too(tmp_path):
    short = (
        "--steps 2 --eval_every 2 --batch 4 --warmup_steps 1 --length 24 --pairs 3 --gap 4 --vocabulary 12 "
        "--valid_rows 4 --test_rows 4 --tensorboard False"
    )
    sizes = "--num_layers 1 --d_model 16 --num_heads 2 --d_ff 16"
    untrained(RECALL, RECALL.sized(config_of(RECALL, f"full {short} {sizes} --workdir {tmp_path}/full")))
    train.recall.main(
        f"local {short} --convert_from {tmp_path}/full --match_steps 4 --workdir {tmp_path}/local".split()
    )
    assert len(metrics_lines(tmp_path / "local" / "matching")) == 4
    assert "val_accuracy" in metrics_lines(tmp_path / "local")[-1]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--convert_from {new}", "--convert_from: no run there: {new}/config.json is missing"),
        ("--convert_from {recall}", "--convert_from: {recall} is of the task 'recall'; expected lm"),
        ("--convert_from {export}", "--convert_from: no checkpoint in {export}/checkpoints"),
        ("--convert_from {moe}", "--convert_from: config.json: model_type must be one of"),
        ("--convert_from {run} --d_model 64", "--d_model has no effect with convert_from, whose network has it"),
        ("--convert_from {run} --tokenizer bytes", "--tokenizer has no effect with convert_from"),
        ("--convert_from {run} --from_hf {run}", "--from_hf has no effect with convert_from"),
        ("--match_steps 4", "--match_steps has no effect without convert_from"),
        ("--convert_from {run} --mechanism full --match_steps 4",
         "--match_steps: expected 0, as every layer keeps the mechanism"),
        ("--convert_from {run} --mechanism gau", "gau cannot replace full"),
        ("--convert_from {run} --mechanism linformer", "has no causal form"),
        ("--convert_from {run} --mechanism.memory output --match_steps 4",
         "--convert_from {run}: mechanism brl reads the network's outputs"),
    ],
)  # fmt: skip
def test_bad_input_is_a_line_and_status_2(teacher, text, tmp_path, monkeypatch, capsys, more, expected):
    places = {"run": teacher} | {name: tmp_path / name for name in ("new", "recall", "moe", "export")}
    exported = json.loads((teacher / "config.json").read_text())
    for name, values in (
        ("recall", {"task": "recall"}),
        ("moe", {"model_type": "mixtral"}),
        ("export", exported),
    ):
        places[name].mkdir()
        (places[name] / "config.json").write_text(json.dumps(values))
    line = words(text, tmp_path / "run", *more.format(**places).split())
    status, err = command("train.lm", line, monkeypatch, capsys)
    assert status == 2
    assert expected.format(**places) in err.splitlines()[-1], err
    assert not (tmp_path / "run").exists()
