"""eval.speed: what it prints and writes, that it refuses wrong results, and that it can be interrupted."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.full import full_attention
from eval import speed
from tests.attention import oracles
from train.errors import RunError, UserError

SMALL = ["--lengths", "40", "96", "--repeats", "2", "--heads", "2", "--head_dim", "8", "--window", "16"]


def test_table_and_json(tmp_path, capsys):
    path = tmp_path / "speed.json"
    speed.main([*SMALL, "--json", str(path)])
    result = json.loads(path.read_text())
    assert result["options"]["window"] == 16
    rows = {(row["length"], row["name"]): row for row in result["rows"]}
    names = ["full", "local"] + ([speed.TORCH] if speed.has_torch(speed.SpeedOptions()) else [])
    assert set(rows) == {(n, name) for n in (40, 96) for name in names}
    for row in rows.values():
        assert row["forward_s"] > 0
        assert row["forward_backward_s"] > 0
        assert row["rounds"] == 2
        base = rows[row["length"], names[-1] if len(names) == 3 else "full"]
        assert row["forward_ratio"] == pytest.approx(base["forward_s"] / row["forward_s"])
    assert rows[96, "local"]["forward_temp_bytes"] > 0
    printed = capsys.readouterr().out
    assert "local" in printed
    assert "target" not in printed  # the targets are for other sizes than these
    assert list(tmp_path.iterdir()) == [path]


def test_without_torch(capsys):
    speed.main([*SMALL, "--torch", "False"])
    assert "torch" not in capsys.readouterr().out


def test_wrong_result_gets_no_number(monkeypatch, capsys, tmp_path):
    """A function whose future leaks into the past is named, not timed, and the command fails."""
    leaks = speed.Case(lambda options: full_attention, speed.CASES["full"].reference)
    monkeypatch.setitem(speed.CASES, "full", leaks)
    path = tmp_path / "speed.json"
    with pytest.raises(RunError, match="wrong results: full at n = 40, full at n = 96"):
        speed.main([*SMALL, "--torch", "False", "--json", str(path)])
    assert "WRONG RESULT" in " ".join(capsys.readouterr().out.split())
    for row in json.loads(path.read_text())["rows"]:
        assert ("forward_s" in row) == (row["name"] == "local")


def test_wrong_gradient_gets_no_number(monkeypatch):
    """A right output does not hide a wrong gradient."""
    import jax

    def no_key_gradient(query, key, value):
        return full_attention(query, jax.lax.stop_gradient(key), value, is_causal=True)

    monkeypatch.setitem(
        speed.CASES, "full", speed.Case(lambda options: no_key_gradient, speed.CASES["full"].reference)
    )
    with pytest.raises(RunError, match="wrong results"):
        speed.main([*SMALL, "--torch", "False"])


def test_what_does_not_fit_is_skipped(monkeypatch, capsys):
    """The smaller program still gets its number."""
    monkeypatch.setattr(speed, "available_bytes", lambda: 700_000)
    speed.main([*SMALL, "--lengths", "400", "--torch", "False"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "GiB of temporary memory" in printed
    assert "WRONG" not in printed


def test_interrupted_run_shows_what_it_has(monkeypatch, tmp_path, capsys):
    calls = []

    def interrupt(*args):
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return original(*args)

    original = speed.verify
    monkeypatch.setattr(speed, "verify", interrupt)
    path = tmp_path / "speed.json"
    with pytest.raises(KeyboardInterrupt):
        speed.main([*SMALL, "--torch", "False", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["length"], row["name"]) for row in rows if row.get("forward_s")] == [
        (40, "full"),
        (40, "local"),
    ]
    assert "local" in capsys.readouterr().out


def test_target_lines(monkeypatch):
    monkeypatch.setattr(speed, "has_torch", lambda options: True)
    rows = [
        {"length": 8192, "name": "local", "note": "", "forward_ratio": 7.04, "forward_backward_ratio": 7.9},
        {"length": 32768, "name": "local", "note": "", "forward_ratio": None, "forward_backward_ratio": None},
    ]
    lines = speed.target_lines(rows, speed.SpeedOptions())
    assert len(lines) == 2
    assert "7.0 times" in lines[0]
    assert lines[0].endswith("target 6: met")
    assert lines[1].endswith("target 8: NOT met")
    assert speed.target_lines(rows, speed.SpeedOptions(window=128)) == []


def test_reference_equals_oracle():
    """The sampled reference of the script against the tests' own."""
    rng = np.random.default_rng(0)
    arrays = tuple(rng.standard_normal((1, 90, 2, 4)).astype(np.float32) for _ in range(4))
    options = speed.SpeedOptions(window=11)
    rows, tail = np.union1d([3, 17], np.arange(60, 90)), 60
    got = speed.CASES["local"].reference(options, arrays, rows, tail)
    visible = oracles.pairs(90, 90, oracles.sliding(10, 0))
    out, _ = oracles.softmax_attention(*arrays[:3], visible)
    d_query, d_key, d_value, _ = oracles.softmax_attention_gradients(*arrays[:3], visible, arrays[3])
    for x, y in zip(got, (out[:, rows], d_query[:, rows], d_key[:, tail:], d_value[:, tail:])):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lengths", "0"], "lengths must be one or more numbers of at least 1, got"),
        (["--window", "0"], "window must be at least 1, got 0"),
        (["--mechanisms", "locall"], "mechanisms must be out of full, local.*, got locall"),
        (["--dtype", "float8"], "dtype"),
        (["--lenghts", "3"], "did you mean --lengths"),
        (["--json", "/does/not/exist.json"], "--json: expected a file in a folder that can be written to"),
    ],
)
def test_bad_input(argv, message):
    with pytest.raises(UserError, match=message) as error:
        speed.main(argv)
    assert "\n" not in str(error.value)


def test_bfloat16_results_are_checked_too():
    rows = []
    from rich.progress import Progress

    options = speed.SpeedOptions(lengths=(64,), heads=2, head_dim=16, window=8, dtype="bfloat16", repeats=1)
    with Progress(disable=True) as progress:
        speed.measure(options, 64, rows, progress)
    assert rows
    assert all(row["note"] == "" for row in rows)
    assert jnp.dtype(options.dtype) == jnp.bfloat16
