"""Speeds, profiles, cached compiled programs, and metrics in Weights & Biases."""

import dataclasses
import json
import os
import shutil
import sys

import jax
import jax.numpy as jnp
import pytest

import train.lm
from brl_jax.models import DecoderLM
from tests.support.command_lines import last_wins
from tests.support.logs import metrics_lines
from tests.support.processes import python
from tests.support.texts import write_splits
from train.engine import throughput
from train.engine.errors import UserError
from train.engine.profiling import Profiler
from train.engine.throughput import Meter, in_words, peak_flops, step_flops
from train.tasks.lm import lm_objective
from train.tasks.lm_config import PRESETS

TINY = (
    "--steps 6 --batch 2 --length 16 --num_layers 1 --d_model 16 --num_heads 2 --d_ff 16 --mechanism local "
    "--mechanism.window 4 --eval_tokens 200 --warmup_steps 2 --sample_tokens 0 --tensorboard False"
)


@pytest.fixture
def line(tmp_path):
    text = write_splits(tmp_path, train="alpha beta gamma " * 300, valid="alpha beta " * 30)
    return f"--workdir {tmp_path}/run --data {text} {TINY}".split()


def test_the_longest_matching_name_gives_a_devices_peak():
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("TPU v5p") == peak_flops("TPU v5") == 459e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("cpu") is None


def test_a_step_takes_three_times_the_operations_of_the_forward_pass():
    """Full attention, gated feed-forward networks and tied logits: six per weight and token, plus attention."""
    config = train.lm.LM.sized(PRESETS["wikitext103-full"])
    model = DecoderLM(config.model)
    objective = lm_objective(model)
    params = jax.eval_shape(objective.init, jax.random.key(0))
    rows, length = 2, 128
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    counted = step_flops(objective, params, {"tokens": tokens, "targets": tokens})
    sizes = config.model
    weights = sizes.num_layers * (4 * sizes.d_model**2 + 3 * sizes.d_model * sizes.d_ff)
    weights += sizes.d_model * sizes.vocab_size
    pairs = sizes.num_layers * 2 * length * sizes.d_model
    assert counted == pytest.approx(6 * rows * length * (weights + pairs), rel=0.01)
    frozen = dataclasses.replace(objective, trained=lambda path: path[-1] == "lora_up")
    assert 3 * step_flops(frozen, params, {"tokens": tokens, "targets": tokens}) == 2 * counted


def test_rates_leave_out_calls_that_compile(monkeypatch):
    clock = iter([0.0, 8.0, 10.0, 10.5, 11.0, 12.0, 12.25, 13.0, 14.0])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))
    meter = Meter(None, "TPU v5e", 4)
    for length, at in ((8, 8.0), (16, 2.0)):  # a step of each length compiles
        meter.started(1, {"tokens": jnp.zeros((4, length))})
        assert meter.call(1000, 197e12, at)["goodput"] == 0
    meter.started(1, {"tokens": jnp.zeros((4, 8))})
    with meter.input():  # 0.5 seconds
        pass
    assert meter.call(1000, 197e12, 2.0) == {  # at 12
        "tokens_per_second": 500,
        "tokens_per_second_per_device": 125,
        "input_wait": 0.25,
        "goodput": 2 / 12,
        "mfu": 0.125,
    }
    with meter.input():  # 0.75 seconds
        pass
    meter_line = in_words(meter.summary())  # at 14
    assert (
        meter_line == "speed: 500 tokens/s, 125 a device, MFU 12.5%, goodput 14.3%, waiting for input 25.0%"
    )


@pytest.mark.slow
def test_a_run_reports_its_speed_and_leaves_a_profile(line, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(throughput.PEAK_FLOPS, "cpu", 1e12)
    train.lm.main([*line, "--profile", "3:4"])
    lines = metrics_lines(tmp_path / "run")
    for each in lines:
        assert 0 < each["mfu"] < 1
        assert 0 <= each["input_wait"] <= 1
        assert each["tokens_per_second_per_device"] <= each["tokens_per_second"]
    assert 0 < lines[-1]["goodput"] < 1
    errors = capsys.readouterr().err
    assert f"profile of steps 3 to 4: tensorboard --logdir {tmp_path}/run/profile" in errors
    assert "speed: " in errors
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_a_profile_of_no_step_is_said(tmp_path, capsys):
    Profiler("3:4", str(tmp_path)).close()
    assert capsys.readouterr().err == "no profile: none of the steps 3 to 4 was trained\n"


@pytest.fixture
def run(line, monkeypatch):
    for name in list(os.environ):
        if name.startswith("JAX"):
            monkeypatch.delenv(name)
    return lambda *more, **environment: python("-m", "train.lm", *last_wins([*line, *more]), **environment)


@pytest.mark.slow
def test_programs_are_kept_in_the_users_cache_unless_told_otherwise(run, tmp_path):
    quick = {"HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    kept = tmp_path / ".cache" / "brl-jax" / "xla"
    done = run("--steps", "1", **quick)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in kept.iterdir()}
    assert any("train_step" in name for name in names)
    shutil.rmtree(kept)
    done = run("--compilation_cache", "none", "--steps", "2", **quick)
    assert done.returncode == 0, done.stderr
    assert not kept.exists()
    assert run("--steps", "3", "--compilation_cache", str(tmp_path / "own"), **quick).returncode == 0
    assert any((tmp_path / "own").iterdir())


@pytest.mark.slow
def test_metrics_in_weights_and_biases_offline(run, tmp_path):
    pytest.importorskip("wandb")
    done = run("--log", "wandb", WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    files = list((tmp_path / "run" / "wandb").rglob("*.wandb"))
    assert len(files) == 1
    content = files[0].read_bytes()
    assert b"val_bits_per_byte" in content
    assert b"d_model" in content
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 6


def test_weights_and_biases_without_its_package_is_a_line(line, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="--log wandb: needs"):
        train.lm.main([*line, "--log", "wandb"])
