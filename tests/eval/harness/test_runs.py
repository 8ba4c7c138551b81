"""How evaluations of several runs name them."""

import json
import os

from etils import epath

from eval.harness.main import _measured_settings
from eval.harness.runs import run_labels, run_names
from eval.tasks.recall import EVALUATION
from tests.support.command_lines import config_of
from train.engine.config_file import write_json
from train.tasks.recall import RECALL


def test_names_are_as_long_as_it_takes_to_differ():
    assert run_names(["runs/a/brl", "runs/a/local"]) == {"runs/a/brl": "brl", "runs/a/local": "local"}
    assert run_names(["runs/a/brl", "runs/b/brl", "runs/b/local"]) == {
        "runs/a/brl": "a/brl",
        "runs/b/brl": "b/brl",
        "runs/b/local": "b/local",
    }
    assert list(run_names(["brl", "runs/brl"]).values()) == [
        f"{os.path.basename(os.getcwd())}/brl",
        "runs/brl",
    ]


def test_one_run_twice():
    assert run_names(["runs/brl", "runs/brl/", "runs/brl"]) == {"runs/brl": "brl", "runs/brl/": "brl"}


def test_labels_name_the_mechanism():
    results = [{"mechanism": "brl", "workdir": f"{place}/0"} for place in ("x", "y")]
    assert run_labels(results) == ["brl (x/0)", "brl (y/0)"]


def test_kept_measures_stand_in_a_table_of_networks(tmp_path, monkeypatch, capsys):
    """A row that is named by the run's configuration needs no second measuring."""
    config = config_of(RECALL, f"local --workdir {tmp_path}/run")
    write_json(RECALL.to_json(config), epath.Path(tmp_path) / "run" / "config.json")
    case = {
        "length": 64,
        "pairs": 4,
        "accuracy": 0.5,
        "state_bytes": 8,
        "guess_in_row": 0.25,
        "chance": 0.125,
    }
    kept = {
        "trained": [[64, 4]], "cases": [case], "learned_at": 7, "flops_per_token": 1e6, "parameters": 3, "seed": 0,
        "step": 1, "measured_settings": _measured_settings(RECALL, config),
    }  # fmt: skip
    (tmp_path / "run" / "recall_test.json").write_text(json.dumps(kept))
    monkeypatch.setattr(EVALUATION, "measure", None)
    EVALUATION.main(["--table", str(tmp_path)])
    assert "| local | 3 | 1.000 | 8 | 0 | 7 | 50.0 |" in capsys.readouterr().out
