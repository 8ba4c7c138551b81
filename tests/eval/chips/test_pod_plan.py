"""Plans for pods: what is refused, and one small plan (needs the package libtpu)."""

import importlib.metadata
import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from eval.chips import pod_plan
from eval.chips.tpu_chips import prepare_compiler
from tests.support.command_lines import config_of
from train.engine.errors import RunError, UserError
from train.tasks.lm import LM

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
pytestmark = pytest.mark.usefixtures("uncached")
SMALL = "small --num_layers 2 --batch 8 --length 128 --mechanism.block_size 128"


def test_a_libtpu_that_this_jax_does_not_take_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    with pytest.raises(
        UserError, match=r"^libtpu 0\.0\.1 does not fit this JAX, which requires it .*: pip install"
    ):
        prepare_compiler()


def test_the_help_is_of_a_plan(capsys):
    with pytest.raises(SystemExit):
        pod_plan.main(["pod-1b", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "  --topology KIND:SHAPE  the slice (v5e:16x16)" in lines
    assert not [line for line in lines if "--workdir" in line or "--learning_rate" in line]


@needs_libtpu
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--mesh.data 3", "--mesh: expected sizes that multiply to the 8 devices, got data 3"),
        ("--batch 4", "--batch: expected a multiple of 8"),
        ("--mesh.tensor 8", "--mesh.tensor: expected a divisor of --num_heads 4, got 8"),
        (
            "--mesh.sequence 8 --mechanism.memory layer",
            "--mechanism.block_size must divide the 16 tokens of a row that each of 8 devices has, got 128",
        ),
    ],
)
def test_what_does_not_divide_is_said_before_anything_is_compiled(options, message):
    changed = SMALL.replace("--batch 8", "") if "--batch" in options else SMALL
    with pytest.raises(UserError, match=message):
        pod_plan.main([*changed.split(), "--topology", "v5e:2x4", *options.split()])


def test_progress_is_shown_and_the_librarys_lines_go_to_a_file(monkeypatch, capfd):
    """Without it, minutes of planning would show nothing but libtpu's messages."""
    monkeypatch.setattr(pod_plan, "prepare_compiler", lambda: None)

    def fail(task, config, topology, begin):
        begin("compiling")
        os.write(2, b"E0000 noise\n")
        raise RunError("v5e:2x2: does not compile")

    monkeypatch.setattr(pod_plan, "make_plan", fail)
    with pytest.raises(RunError, match="does not compile"):
        pod_plan.main(["small", "--topology", "v5e:2x2"])
    os.write(2, b"after\n")
    first, *more = capfd.readouterr().err.splitlines()
    log = Path(re.fullmatch("messages of the compiler go to (.*)", first)[1])
    assert more == ["compiling", "after"]
    assert log.read_text() == "E0000 noise\n"
    log.unlink()


@needs_libtpu
def test_a_small_plan(capfd):
    pod_plan.main([*SMALL.split(), "--topology", "v5e:2x4", "--json"])
    out, err = capfd.readouterr()
    assert [line for line in err.splitlines() if re.match(r"[EWI]\d{4}|WARNING", line)] == []
    assert "\ncompiling the step, which may take minutes\n" in err
    plan = json.loads(out.splitlines()[-1])
    assert plan["fits"]
    assert plan["mesh"] == {"data": 1, "fsdp": 8, "sequence": 1, "tensor": 1}
    # One copy spread over eight devices, except the vectors; two moments.
    assert plan["parameters"] * 4 / 8 < plan["parameter_bytes"] < plan["parameters"] * 4 / 7
    assert 1.99 < plan["optimizer_bytes"] / plan["parameter_bytes"] < 2.01
    parts = ("parameter", "optimizer", "memory", "gradient", "activation", "temporary", "program")
    assert abs(sum(plan[f"{part}_bytes"] for part in parts) / plan["total_bytes"] - 1) < 0.2
    assert plan["total_bytes"] < plan["hbm_bytes"] == 16 * 2**30
    # At least two operations for each parameter and token, forward, and twice that backward.
    assert plan["matrix_flops"] > 6 * (plan["parameters"] - 128 * 256) * 0.5 * plan["tokens"] / 8
    # Each weight is gathered in both directions, and its gradient is scattered.
    assert plan["collective_bytes"]["all-gather"] > 0
    assert plan["bound_seconds"] == max(plan[f"{part}_seconds"] for part in ("matrix", "hbm", "link"))


def test_what_does_not_fit_is_told(monkeypatch, capsys):
    parts = ["parameter", "optimizer", "memory", "gradient", "activation", "temporary", "program"]
    plan = {
        "topology": "v5e:2x2", "devices": 4, "mesh": {"data": 1, "fsdp": 4, "sequence": 1, "tensor": 1},
        "parameters": 1, **{f"{part}_bytes": 1 for part in parts}, "total_bytes": 2**35, "hbm_bytes": 2**34,
        "matrix_flops": 1.0, "collective_bytes": {}, "matrix_seconds": 1.0, "hbm_seconds": 2.0, "link_seconds": 0.5,
        "tokens": 8, "compile_seconds": 1.0, "fits": False, "bound_seconds": 2.0, "matrix_share": 0.5,
        "tokens_per_second": 4.0,
    }  # fmt: skip
    mesh = type("Mesh", (), {"shape": plan["mesh"]})()
    monkeypatch.setattr(pod_plan, "prepare_compiler", lambda: None)
    monkeypatch.setattr(pod_plan, "make_plan", lambda *_: (plan, mesh))
    with pytest.raises(RunError, match=r"v5e:2x2: does not fit; to change: .*--remat full"):
        pod_plan.main(["small", "--topology", "v5e:2x2"])
    out = capsys.readouterr().out
    assert "does not fit: 32.00 of 16 GiB" in out
    assert "matrix products are 50% of it" in out


@pytest.mark.parametrize(("num_kv_heads", "is_said"), [(None, True), (1, False)])
def test_what_would_be_refused_is_not_said_to_help(num_kv_heads, is_said):
    config = config_of(LM, f"small --batch 4 --accumulation 1 --num_kv_heads {num_kv_heads}")
    mesh = type("Mesh", (), {"shape": {"data": 1, "fsdp": 4, "sequence": 1, "tensor": 1}})()
    assert ("--mesh.tensor 2 shares each layer" in pod_plan.advice(config, mesh, 1, 1)) == is_said
