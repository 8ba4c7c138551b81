"""Runs can be read without the training code; outside a checkout, commands say that they need one."""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

import brl_jax
import train.lm
from brl_jax import commands
from brl_jax.loading import _network, load_run
from eval.harness.runs import open_run
from tests.support.processes import python
from tests.support.texts import write_splits
from train.tasks.every import TASKS
from train.tasks.lm import LM

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    text = write_splits(folder, "alpha beta gamma " * 40)
    line = (
        f"--data {text} --workdir {folder}/run --steps 2 --batch 2 --length 16 --num_layers 1 "
        "--d_model 16 --num_heads 2 --d_ff 16 --mechanism local --tensorboard False --sample_tokens 0"
    )
    train.lm.main(line.split())
    return folder / "run"


def test_a_run_is_what_evaluation_reads(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    _, _, model, params, step = open_run([LM], f"{tmp_path}/run", "best")
    loaded = load_run(tmp_path / "run")
    assert repr(loaded).startswith("LoadedRun(model=DecoderLM, step=")
    assert len(repr(loaded)) < 100
    assert loaded.step == step == 2
    assert loaded.config["loop"]["steps"] == 2
    jax.tree.map(np.testing.assert_array_equal, loaded.variables["params"], params)
    tokens = np.arange(12, dtype=np.int32)[None]
    np.testing.assert_array_equal(
        jax.jit(loaded.model.apply)(loaded.variables, tokens)[0],
        jax.jit(model.apply)({"params": params}, tokens)[0],
    )
    with pytest.raises(
        FileNotFoundError, match=r"^workdir: no run there: \S+/nowhere/config.json is missing$"
    ):
        load_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"checkpoint: expected one of best, last, 2, got 7"):
        load_run(tmp_path / "run", 7)
    shutil.copytree(tmp_path / "run", tmp_path / "new", ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(FileNotFoundError, match=r"^checkpoint: no checkpoint in \S+/new/checkpoints$"):
        load_run(tmp_path / "new")
    # Skips a checkpoint that a crash truncated, as training and evaluation do.
    cut = tmp_path / "run" / "checkpoints" / "1"
    cut.mkdir()
    assert load_run(tmp_path / "run").step == 2
    with pytest.raises(ValueError, match="checkpoints/1 cannot be read"):
        load_run(tmp_path / "run", 1)
    (cut.parent / "3").mkdir()
    assert load_run(tmp_path / "run", "last").step == 2
    for content in ("[1]", "null", "{}", "[" * 100_000, '{"model": 1e999}', '{"task": "lm", '):
        (tmp_path / "run" / "config.json").write_text(content)
        with pytest.raises(ValueError, match=f"^{tmp_path}/run/config.json.*$"):
            load_run(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text('{"network": "Parity", "model": {}}')
    with pytest.raises(ValueError, match=r"network must be one of DecoderLM, .* got 'Parity'"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize("name", TASKS)
def test_networks_of_every_task_are_built_or_refused(name):
    task = TASKS[name]
    preset = task.presets[task.default_preset]
    try:
        network = type(task.model(preset)).__name__
    except ValueError:
        network = "Classifier"  # its data determine the sizes
    config = {"network": network, **task.to_json(preset)}
    if name == "graph":
        with pytest.raises(ValueError, match="network must be one of DecoderLM"):
            _network(config)
    else:
        model, inputs = _network(config)
        assert jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0), *inputs))


def test_the_version_stands_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "brl_jax.__version__"
    assert importlib.metadata.version("brl-jax") == brl_jax.__version__


def test_commands_of_a_checkout(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["brl-train", "lmm"])
    assert commands.train() == 2
    assert (
        "NAME: expected one of copy, forecast, glue, graph, lm, lra, lra_data, mlm, recall, regression, tokenize, "
        "got 'lmm'" in capsys.readouterr().err
    )
    for start, words, message in (
        (commands.train, "brl-train lm --steps 0", "train.lm: --steps must be at least 1, got 0"),
        (commands.evaluate, "brl-eval speed --repeats 0", "eval.speed: --repeats"),
    ):
        for module in (
            "train.lm",
            "eval.speed",
            "eval.speed.__main__",
        ):  # runpy warns of modules that are imported
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.setattr(sys, "argv", words.split())
        with pytest.raises(SystemExit, match="2"):
            start()
        assert message in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["brl-train", "--completion", "fish"])
    assert commands.train() == 2
    assert "--completion: expected bash or zsh, got fish" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["brl-train", "--completion", "bash"])
    monkeypatch.delitem(sys.modules, "train.cli.completion", raising=False)
    assert commands.train() == 0
    script = capsys.readouterr().out
    for words, completed in (
        (["brl-train", "reg"], "regression"),
        (["brl-train", "lm", "--learning_r"], "--learning_rate"),
        (["brl-train", "forecast", "enc"], "encoder"),
        (["brl-train", "lm", "--mechanism", "delt"], "deltanet"),
    ):
        typed = (
            f"COMP_WORDS=({' '.join(words)}) COMP_CWORD={len(words) - 1}\n_brl_train\necho ${{COMPREPLY[@]}}"
        )
        done = subprocess.run(
            ["bash", "-c", f"{script}\n{typed}"], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [completed]
    monkeypatch.setattr(sys, "argv", ["brl-train", "lm"])
    # As installed from a wheel.
    monkeypatch.setattr(commands, "_ROOT", tmp_path)
    assert commands.train() == 2
    assert "expected a checkout of the repository" in capsys.readouterr().err


def test_commands_without_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tyro" else name)
    with pytest.raises(SystemExit):
        train._check_extra("train.lm")
    assert capsys.readouterr().err == "train.lm: the module tyro is missing: pip install -e '.[train]'\n"


def test_every_module_of_the_extra_is_looked_for(monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    looked_for = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: looked_for.append(name) or name)
    train._check_extra("train.lm")
    assert len(looked_for) == len(project["project"]["optional-dependencies"]["train"])


def test_the_library_imports_neither_the_training_code_nor_kernels():
    """Otherwise GPU users would wait for Triton at start-up and could no longer choose its interpreter."""
    code = (
        "import sys, jax.numpy as jnp, brl_jax\n"
        "x = jnp.ones((1, 4, 2, 8))\n"
        "brl_jax.propagate(x, x, x, strength=0.5, implementation='xla')\n"
        "heavy = ('optax', 'orbax', 'tyro', 'grain', 'train', 'triton', 'pallas_kernels.triton')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert python("-c", code).stdout == "[]\n"
