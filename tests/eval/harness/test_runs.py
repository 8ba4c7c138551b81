"""How evaluations of several runs name them."""

import os

from eval.harness.runs import run_labels, run_names


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
