"""A small part of the table of losses on many meshes, and how large a difference is an error."""

import math
import re

import pytest

from eval.chips import mesh_check
from eval.harness.batches import make_batch
from tests.marks import slow_unless
from train.engine.errors import RunError
from train.tasks.every import TASKS


def test_every_mechanism_with_a_causal_form_is_a_candidate():
    candidates = mesh_check.candidates()
    assert {"full", "brl-layer", "deltanet", "tlinformer", "bilinear_btt"} <= candidates.keys()
    assert all(mechanism.causal for mechanism in candidates.values())


def test_the_worst_step_counts():
    one = {"losses": [4.0, 2.0]}
    assert mesh_check.difference({"losses": [4.0, 2.002]}, one) == pytest.approx(1e-3)
    assert mesh_check.difference({"losses": [4.0, math.nan]}, one) == "not finite"
    assert mesh_check.difference({"error": "no"}, one) == "no"


@pytest.mark.parametrize(("far", "fails"), [(1e-5, False), (1e-3, True)])
def test_the_table(monkeypatch, capsys, far, fails):
    def answers(request, *_):
        for where in request["meshes"]:
            loss = 3.0 * (1 + far) if where == "data 8" else 3.0
            yield {"mechanism": "local", "mesh": where, "losses": [4.0, loss]}

    monkeypatch.setattr(mesh_check, "_run", answers)
    monkeypatch.setattr(mesh_check, "_run_two", answers)
    options = ["--mechanisms", "local", "--meshes", "data 8", mesh_check._TWO]
    if fails:
        with pytest.raises(RunError, match=r"losses differ by more than 0.0001: local"):
            mesh_check.main(options)
    else:
        mesh_check.main(options)
    assert f"| local | 4.00 to 3.00 | {far:.0e} | 0e+00 |" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one_device(capsys):
    mesh_check.main(["--mechanisms", "local", "--meshes", mesh_check._TWO, "--steps", "2"])
    row = re.search(r"\| local \| ([\d.]+) to ([\d.]+) \| ([\d.e-]+) \|", capsys.readouterr().out)
    first, last, far = map(float, row.groups())
    # 64 tokens with untrained weights: slightly worse than uniform, and better after a step.
    assert math.log(64) < first < math.log(64) + 2
    assert last < first
    assert far < 1e-5


@pytest.mark.parametrize("name", slow_unless(TASKS, ("lm", "lra")))
def test_every_task_is_a_candidate(name):
    """Its random batches fit the objective, and contain only tokens and classes that the model has."""
    task = TASKS[name]
    mechanisms = mesh_check.candidates(task)
    assert {"full", "local", "brl"} <= mechanisms.keys()
    config = mesh_check.small_config(task, mechanisms["local"])
    batch = make_batch(task, config)
    assert {key: (x.shape, x.dtype) for key, x in batch.arrays.items()} == {
        key: (x.shape, x.dtype) for key, x in task.batch_shapes(config, 8).items()
    }
    if "tokens" in batch.arrays:
        assert 0 <= batch["tokens"].min() <= batch["tokens"].max() < config.model.vocab_size
    if name == "lra":
        assert batch["targets"].max() < config.model.num_classes
    task.build(config)
