"""A task is one object: a new one in a single file trains, resumes, is measured and planned."""

import dataclasses
import json
import re
import shutil

import flax.linen as nn
import jax
import pytest

import train.cli.main
import train.lm
from tests.support.logs import measured_lines
from tests.support.texts import write_splits
from tests.train import parity
from tests.train.toy import ToyHeldOut, ToyStream
from train.cli.main import check_alike
from train.engine.errors import UserError
from train.engine.fields import Mark, marked
from train.tasks.every import TASKS
from train.tasks.task import read_config


def test_a_new_task_end_to_end(tmp_path, capsys):
    """Trained by its command, resumed, and measured as during training."""
    parity.main(["--workdir", f"{tmp_path}/cut", "--steps", "4", "--seed", "3"])
    err = capsys.readouterr().err
    assert f"training: 4 steps of 32 tokens (8 rows), in {tmp_path}/cut\n" in err
    assert f"done: 4 steps in {tmp_path}/cut, " in err
    # The folder is enough to resume the run with its configuration, and to change what a resumed run may change.
    parity.main(["--workdir", f"{tmp_path}/cut"])
    assert "nothing is left to train: the run is at step 4, and --steps is 4" in capsys.readouterr().err
    parity.main(["--workdir", f"{tmp_path}/cut", "--steps", "6"])
    parity.main(["--workdir", f"{tmp_path}/whole", "--seed", "3"])
    whole, cut = (measured_lines(tmp_path / name) for name in ("whole", "cut"))
    assert [entry["step"] for entry in whole] == list(range(1, 7))
    # Step 4 was once the last one, so it was measured.
    assert [entry | {"val_loss": 0, "val_accuracy": 0} for entry in cut] == [
        pytest.approx(entry | {"val_loss": 0, "val_accuracy": 0}) for entry in whole
    ]
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "checkpoints",
    }
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["task"] == "parity"
    capsys.readouterr()
    parity.evaluation.main(["--workdir", str(tmp_path / "whole"), "--split", "valid", "--checkpoint", "last"])
    result = json.loads(capsys.readouterr().out)
    assert result["accuracy"] == pytest.approx(whole[-1]["val_accuracy"])
    assert (result["step"], result["split"]) == (6, "valid")
    with pytest.raises(UserError, match="is of another configuration: bits 4 -> 5"):
        parity.main(["--workdir", f"{tmp_path}/cut", "--bits", "5"])
    with pytest.raises(UserError, match=r"unknown option --vocab_size"):
        parity.main(["--vocab_size", "3"])
    with pytest.raises(UserError, match=r"config.json is of the task 'parity'; expected lm"):
        read_config([TASKS["lm"]], tmp_path / "cut" / "config.json")
    # A refused command must write nothing: its data and tokenizer would replace the run's.
    (tmp_path / "text.train.txt").write_text("a line\n" * 50)
    for _ in range(2):
        before = sorted(path.name for path in (tmp_path / "cut").iterdir())
        with pytest.raises(UserError, match="is of another configuration: task parity -> lm"):
            train.lm.main(["--data", f"text:{tmp_path}/*.txt", "--workdir", f"{tmp_path}/cut"])
        assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == before
        shutil.rmtree(tmp_path / "cut" / "checkpoints", ignore_errors=True)
    # Nor does it replace the file of another program.
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"model_type": "llama"}')
    for more in ([], ["--bits", "5"]):
        with pytest.raises(UserError, match=r"theirs/config\.json: task is missing$"):
            parity.main(["--workdir", f"{tmp_path}/theirs", *more])
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["config.json"]


@pytest.mark.slow
def test_a_folder_without_a_checkpoint_yet_has_its_configuration(tmp_path, capsys):
    """A run that was killed before its first checkpoint starts again as it was."""
    parity.main(["--workdir", f"{tmp_path}/run", "--steps", "2", "--bits", "5"])
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    parity.main(["--workdir", f"{tmp_path}/run"])
    assert f"done: 2 steps in {tmp_path}/run, " in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["bits"] == 5


@pytest.mark.slow
def test_a_command_that_failed_before_it_trained_binds_no_folder(tmp_path):
    """The corrected command may name other data and another tokenizer."""
    text = "the line of text\n" * 200
    short, long = (write_splits(tmp_path / str(len(x)), train=text, valid=x) for x in ("\n", text))
    options = (
        "--steps 1 --batch 2 --length 8 --num_layers 1 --d_model 8 --num_heads 2 --d_ff 8 --sample_tokens 0 "
        f"--mechanism full --tensorboard False --workdir {tmp_path}/run --data"
    )
    with pytest.raises(UserError, match="--data: the held-out text must have at least 2 tokens, got 1"):
        train.lm.main(f"{options} {short} --tokenizer words:max=3".split())
    assert (tmp_path / "run" / "data.json").exists()
    train.lm.main(f"{options} {long}".split())
    message = r"--tokenizer: the run in .* was started with 'bpe:2048', got 'words'"
    with pytest.raises(UserError, match=message):
        train.lm.main(f"{options} {long} --tokenizer words".split())


@pytest.mark.parametrize("name", ["digest", "held_out"])
def test_processes_with_other_data_are_refused(monkeypatch, name):
    stream, held_out = ToyStream(), ToyHeldOut()
    check_alike(stream, held_out)
    held_out.digest = "a"

    def gathered(state):
        assert state == {"step": 0, "held_out": "a"}
        return [state | {name: other} for other in ("a", "a", "b", "c")]

    monkeypatch.setattr(train.cli.main, "gather", gathered)
    with pytest.raises(UserError, match=r"^--data: process 2, 3 of 4 has other data than the first"):
        check_alike(stream, held_out)


@pytest.mark.parametrize("name", TASKS)
def test_every_task(name):
    """Presets have the task's class, fields are marked, and the objective takes a batch of the declared shapes."""
    task = TASKS[name]
    assert task.name == name
    for preset in task.presets.values():
        assert type(preset) is task.config_class
    assert {"loop.steps", "loop.workdir", "mesh", "hosts"} <= task.free_fields()
    assert not {"loop.seed", "loop.batch", "model", "optimizer"} & task.free_fields()
    assert set(marked(task.config_class, Mark.DECIDED)) >= (
        {"model.vocab_size"}
        if name in ("lm", "lra", "lra_denoise", "lra_trace", "mlm", "copy", "recall", "forecast_tokens")
        else {"model"}
        if name == "glue"
        else {"model.kinds", "model.num_classes"}
        if name == "graph"
        else {"model.num_inputs"}
    )
    config = task.sized(task.presets[task.default_preset])
    model = task.build(config)
    objective = task.objective(model, config)
    batch = task.batch_shapes(config, 3)
    sums, _ = jax.eval_shape(
        lambda key: objective.sums(objective.init(key), objective.init_memory(3), batch_of(batch), None),
        jax.random.key(0),
    )
    assert sums.keys() == {"loss", "weight", *objective.averages}

    def program(config, key):
        """What a call computes, without the addresses of functions."""
        called = task.objective(model, config)
        memory = jax.eval_shape(lambda: called.init_memory(3))
        params = nn.unbox(jax.eval_shape(called.init, jax.random.key(0)))
        return re.sub(r"0x\w+", "", str(jax.make_jaxpr(called.sums)(params, memory, batch, key)))

    with_z = dataclasses.replace(config, z_loss=0.1)
    key = jax.random.key(0)
    assert (program(config, key) != program(with_z, key)) == ("z_loss" not in config.without_effect())
    assert program(config, None) == program(with_z, None)


def batch_of(shapes):
    return {name: jax.numpy.zeros(x.shape, x.dtype) for name, x in shapes.items()}


def test_names_and_classes_tell_tasks_apart():
    presets = [preset for task in TASKS.values() for preset in task.presets]
    assert len(set(presets)) == len(presets)
    assert len({task.config_class for task in TASKS.values()}) == len(TASKS)
