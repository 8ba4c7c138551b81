"""eval.speed: what it prints and writes, that it refuses wrong results, and that it can be interrupted."""

import dataclasses
import json
import signal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.dense.full import full_attention
from brl_jax.layers import MECHANISMS, FullConfig
from eval.speed import encoders, functions, layers, measure, training
from eval.speed.__main__ import main
from eval.speed.options import SpeedOptions
from tests.oracles import attention as oracles
from tests.support.command_lines import last_wins
from train.engine.errors import RunError
from train.engine.step import make_eval_step
from train.tasks.lm import LM

SMALL = ["--lengths", "40", "96", "--repeats", "2", "--heads", "2", "--head_dim", "8"]
FUNCTIONS = [*SMALL, "--window", "16", "--levels", "functions"]
NETWORKS = [*SMALL, "--lengths", "24", "40", "--repeats", "1", "--batch", "2"]
TWO = ["--mechanisms", "full", "local"]


def measured(tmp_path, *argv):
    """What the command writes, and its rows by length and name."""
    path = tmp_path / "speed.json"
    main(last_wins([*argv, "--json", str(path)]))
    result = json.loads(path.read_text())
    return result, {(row["length"], row["name"]): row for row in result["rows"]}


@pytest.mark.slow
def test_functions_table_and_json(tmp_path, capsys):
    result, rows = measured(tmp_path, *FUNCTIONS)
    assert result["options"]["window"] == 16
    names = [*functions.CASES] + ([functions.TORCH] if functions.has_torch(SpeedOptions()) else [])
    assert set(rows) == {(n, name) for n in (40, 96) for name in names}
    for (length, _), row in rows.items():
        assert row["level"] == "functions"
        assert row["rounds"] == 2
        base = rows[length, functions.TORCH if functions.TORCH in names else "full"]
        for program in ("forward", "forward_backward"):
            assert row[f"{program}_s"] > 0
            assert row[f"{program}_ratio"] == pytest.approx(base[f"{program}_s"] / row[f"{program}_s"])
            assert row[f"{program}_tokens_per_s"] == pytest.approx(length / row[f"{program}_s"])
    assert rows[96, "local"]["forward_temp_bytes"] > 0
    assert "local" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]


def test_every_listed_mechanism_has_a_layer_case():
    cases = layers.cases(SpeedOptions(), 64)
    # TLinFormer is not a layer; eval.speed --generation measures it.
    assert [case.name for case in cases] == [name for name in MECHANISMS if name != "tlinformer"]
    assert {case.name: case.growth for case in cases}["full"] == 2
    assert {case.name: case.growth for case in cases}["brl"] == 1


@pytest.mark.slow
def test_encoders(tmp_path, capsys):
    """All rows of the named mechanisms, forward only, and PyTorch's network if it is installed."""
    argv = [*SMALL, "--lengths", "40", "--repeats", "1", "--levels", "encoders"]
    _, rows = measured(tmp_path, *argv, "--mechanisms", "full", "linformer")
    torch = [functions.TORCH] if functions.has_torch(SpeedOptions()) else []
    assert [name for _, name in rows] == ["full", *(f"linformer k {k}" for k in (64, 128, 256)), *torch]
    base = rows[40, torch[0] if torch else "full"]
    for row in rows.values():
        assert row["note"] == ""
        assert row["forward_ratio"] == pytest.approx(base["forward_s"] / row["forward_s"])
        assert "forward_backward_s" not in row
    assert "encoders of 4 layers of width 16" in " ".join(capsys.readouterr().out.split())
    assert [case.name for case in encoders.cases(SpeedOptions(torch=False), 64)][-1] == "brl w 512 m 128"


@pytest.mark.slow
def test_decoders(tmp_path, capsys):
    """Inference and a training step of the networks of tables 6 and 7; the compiler reports the memory."""
    argv = [*NETWORKS, "--levels", "decoders", *TWO, "--pictures", str(tmp_path)]
    _, rows = measured(tmp_path, *argv)
    assert set(rows) == {(n, name) for n in (24, 40) for name in ("full", "local")}
    config = training.decoder_config("local", SpeedOptions(heads=2, head_dim=8, batch=2), 40)
    objective = LM.objective(LM.model(config), config)
    params = nn.unbox(jax.eval_shape(objective.init, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((2, 40), jnp.int32)
    compiled = jax.jit(make_eval_step(objective)).lower(params, None, {"tokens": tokens, "targets": tokens})
    row = rows[40, "local"]
    assert row["forward_temp_bytes"] == compiled.compile().memory_analysis().temp_size_in_bytes
    assert row["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert row["train_bytes"] > row["train_temp_bytes"]
    assert row["train_ratio"] == pytest.approx(rows[40, "full"]["train_s"] / row["train_s"])
    assert row["forward_ratio"] == pytest.approx(rows[40, "full"]["forward_s"] / row["forward_s"])
    assert (tmp_path / "decoders.png").stat().st_size > 10_000
    assert "decoders of width 16, inference and training" in " ".join(capsys.readouterr().out.split())


def test_decoders_have_the_sizes_of_tables_6_and_7():
    options = SpeedOptions(mechanisms=("full", "local", "brl-paper"), heads=8, batch=4)
    made = training.decoders(options, 4096)
    assert [(case.name, case.growth) for case in made] == [("full", 2), ("local", 1), ("brl-paper", 1)]
    config = made[-1].make.args[1]
    assert (config.model.num_layers, config.model.d_model, config.model.d_ff) == (6, 512, 2048)
    assert (config.loop.batch, config.loop.length, config.model.vocab_size) == (4, 4096, 50257)
    mechanism = config.model.mechanism
    assert (mechanism.window, mechanism.num_compressed) == (128, 128)
    assert (mechanism.block, mechanism.history, mechanism.memory) == (4096, 4096, "output")


def test_encoder_decoders_have_the_sizes_of_figure_5():
    made = training.encoder_decoders(SpeedOptions(mechanisms=("full", "local-50", "linformer-64")), 96)
    assert [(case.name, case.growth) for case in made] == [("full", 2), ("linformer-64", 2), ("local-50", 1)]
    config = made[-1].make.args[1]
    assert (config.model.encoder_layers, config.model.num_layers, config.model.d_model) == (1, 8, 256)
    assert (config.data.length, config.data.min_length, config.loop.batch) == ((96,), 96, 1)
    assert config.model.cross_window == config.model.mechanism.window == 50


@pytest.mark.slow
def test_layers_table_json_and_pictures(tmp_path, capsys):
    pictures = tmp_path / "pictures"
    argv = [*SMALL, "--levels", "layers", "--mechanisms", "full", "--pictures", str(pictures)]
    result, rows = measured(tmp_path, *argv)
    assert set(rows) == {(40, "full"), (96, "full")}
    for row in rows.values():
        assert row["level"] == "layers"
        assert row["step_tokens_per_s"] == pytest.approx(1 / row["step_s"])
        assert row["parameters"] == 4 * 16 * 16 + 3 * 16 * 64 + 3 * 16
        assert row["forward_backward_temp_bytes"] > 0
    kept = rows[96, "full"]["state_bytes"] - rows[40, "full"]["state_bytes"]
    assert kept == (96 - 40) * 2 * 16 * 4  # one key and one value per token
    growth = np.log(rows[96, "full"]["forward_s"] / rows[40, "full"]["forward_s"]) / np.log(96 / 40)
    fitted = {entry["name"]: entry for entry in result["exponents"]}
    assert fitted["full"]["forward_s"] == pytest.approx(growth)
    printed = capsys.readouterr().out
    assert "fitted exponents, n = 40 to 96" in printed
    assert (pictures / "layers.png").read_bytes().startswith(b"\x89PNG")


class LeakyConfig(FullConfig):
    """Full attention that sees the future, except while decoding."""

    def layer(self, dimensions, **kwargs):
        return super().layer(dataclasses.replace(dimensions, is_causal=False), **kwargs)


@pytest.mark.slow
def test_wrong_layer_gets_no_number(monkeypatch, capsys):
    monkeypatch.setattr(layers, "default_config", lambda name, length: LeakyConfig())
    with pytest.raises(RunError, match="wrong results: full at n = 40"):
        main(last_wins([*SMALL, "--levels", "layers", "--mechanisms", "full", "--lengths", "40"]))
    printed = " ".join(capsys.readouterr().out.split())
    assert "WRONG RESULT: decoding is off the forward pass" in printed


def test_results_must_be_finite_and_of_their_shape():
    measure.check_finite("output", jnp.ones(2), (2,))
    with pytest.raises(measure.NoNumber, match="WRONG RESULT: output is not finite"):
        measure.check_finite("output", jnp.asarray([1.0, jnp.nan]), (2,))
    with pytest.raises(measure.NoNumber, match=r"WRONG RESULT: output has shape \(2,\), expected \(3,\)"):
        measure.check_finite("output", jnp.ones(2), (3,))


def test_what_does_not_fit_or_takes_too_long_is_skipped(monkeypatch, capsys):
    """Smaller programs still get numbers, and the table says why the others have none."""
    monkeypatch.setattr(measure, "available_bytes", lambda: 700_000)
    main(last_wins([*FUNCTIONS, *TWO, "--lengths", "400", "--torch", "False"]))
    printed = " ".join(capsys.readouterr().out.split())
    assert "no room" in printed
    assert "GiB of temporary memory" in printed
    assert "WRONG" not in printed

    rows = [{"length": 100, "name": "full", "note": "", "forward_s": 1.0, "forward_backward_s": 2.0}]
    quadratic, linear = (measure.Case("full", growth, lambda: None) for growth in (2, 1))
    measure.check_patience(quadratic, 400, rows, limit=49.0)
    measure.check_patience(linear, 1600, rows, limit=49.0)
    with pytest.raises(
        measure.NoNumber, match=r"too slow: a round would take about 48 s.* n = 100; limit is 47 s"
    ):
        measure.check_patience(quadratic, 400, rows, limit=47.0)
    measure.check_patience(quadratic, 50, rows, limit=0.1)


def test_too_slow_in_a_run(capsys):
    main(last_wins([*FUNCTIONS, "--torch", "False", "--mechanisms", "full", "--limit", "1e-6"]))
    printed = " ".join(capsys.readouterr().out.split())
    assert "functions, full at n = 96: too slow: a round would take about 0 s" in printed


@pytest.mark.slow
def test_wrong_result_gets_no_number(monkeypatch, capsys, tmp_path):
    """A function that leaks the future is named and not timed, and the command fails."""
    leaks = dataclasses.replace(functions.CASES["full"], function=lambda options, *qkv: full_attention(*qkv))
    monkeypatch.setitem(functions.CASES, "full", leaks)
    path = tmp_path / "speed.json"
    with pytest.raises(RunError, match="wrong results: full at n = 40, full at n = 96"):
        main(last_wins([*FUNCTIONS, *TWO, "--torch", "False", "--json", str(path)]))
    assert "WRONG RESULT" in " ".join(capsys.readouterr().out.split())
    for row in json.loads(path.read_text())["rows"]:
        assert ("forward_s" in row) == (row["name"] == "local")


def test_wrong_gradient_gets_no_number(monkeypatch):
    """A correct output does not excuse a wrong gradient."""

    def no_key_gradient(options, query, key, value):
        return full_attention(query, jax.lax.stop_gradient(key), value, is_causal=True)

    wrong = dataclasses.replace(functions.CASES["full"], function=no_key_gradient)
    monkeypatch.setitem(functions.CASES, "full", wrong)
    with pytest.raises(RunError, match="wrong results"):
        main(last_wins([*FUNCTIONS, "--torch", "False", "--mechanisms", "full"]))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_shows_what_it_has(monkeypatch, tmp_path, capsys, signum):
    calls = []
    handler = signal.getsignal(signal.SIGTERM)

    def interrupt(*args):
        calls.append(1)
        if len(calls) > 3:
            signal.raise_signal(signum)
        return original(*args)

    original = functions.verify
    monkeypatch.setattr(functions, "verify", interrupt)
    # A shell's background processes would ignore Ctrl-C.
    ignoring = signal.signal(signal.SIGINT, signal.default_int_handler)
    path = tmp_path / "speed.json"
    with pytest.raises(KeyboardInterrupt):
        main(last_wins([*FUNCTIONS, *TWO, "--torch", "False", "--json", str(path)]))
    rows = json.loads(path.read_text())["rows"]
    assert [(row["length"], row["name"]) for row in rows if row.get("forward_s")] == [
        (40, "full"),
        (40, "local"),
    ]
    assert [row["note"] for row in rows if row["length"] == 96] == [
        "interrupted: not timed to the end of a round"
    ]
    assert "local" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is handler
    signal.signal(signal.SIGINT, ignoring)


def test_reference_equals_oracle():
    """The script's sampled reference agrees with the tests' oracle."""
    rng = np.random.default_rng(0)
    arrays = tuple(rng.standard_normal((1, 90, 2, 4)).astype(np.float32) for _ in range(4))
    options = SpeedOptions(window=11, head_dim=4)
    rows, tail = np.union1d([3, 17], np.arange(60, 90)), 60
    got = functions.CASES["local"].reference(options, arrays, rows, tail)
    visible = oracles.pairs(90, 90, oracles.sliding(10, 0))
    out, _ = oracles.softmax_attention(*arrays[:3], visible)
    d_query, d_key, d_value, _ = oracles.softmax_attention_gradients(*arrays[:3], visible, arrays[3])
    for x, y in zip(got, (out[:, rows], d_query[:, rows], d_key[:, tail:], d_value[:, tail:])):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_bfloat16_results_are_checked_too(tmp_path):
    argv = ["--lengths", "64", "--dtype", "bfloat16", "--mechanisms", "full", "--repeats", "1"]
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms promote 16-bit types implicitly
        rows = measured(tmp_path, *SMALL, *argv)[0]["rows"]
    assert {row["level"] for row in rows} == {"functions", "layers"}
    assert all(row["note"] == "" for row in rows)


def test_a_short_program_does_not_pay_for_the_one_before_it(monkeypatch):
    """The first run of a round, slow while memory is returned, is discarded; a long program has no such run."""
    now = 0.0
    costs = iter([0.9, 0.02, 0.7, 0.02, 0.8, 0.03])

    def run():
        nonlocal now
        now += next(costs)

    monkeypatch.setattr("eval.speed.measure.time.perf_counter", lambda: now)
    short = measure.Program(run, None, steps=2)
    short.warm_up()
    rounds = [short.measure(), short.measure()]
    np.testing.assert_allclose(rounds, [0.02, 0.03])
    np.testing.assert_allclose(short.seconds, [0.01, 0.015])
    costs = iter([4.0, 3.0])
    long = measure.Program(run, None)
    long.warm_up()
    long.measure()
    np.testing.assert_allclose(long.seconds, [4.0, 3.0])


def test_calls_on_a_gpu_are_enqueued_before_one_wait(monkeypatch):
    """A kernel of 1 ms that takes 10 us to launch: a round of many calls measures the kernel, not the launch and
    wait."""
    now = done = 0.0
    waits = []

    def launch():
        nonlocal now, done
        now += 10e-6
        done = max(done, now) + 1e-3

    def wait(result):
        nonlocal now
        now = max(now, done) + 500e-6
        waits.append(now)

    monkeypatch.setattr(measure, "on_gpu", lambda: True)
    monkeypatch.setattr("eval.speed.measure.time.perf_counter", lambda: now)
    program = measure.Program(launch, None, wait=wait)
    program.warm_up()
    assert program.calls == 13  # 20 ms at 1.51 ms a call
    waits.clear()
    program.measure()
    assert len(waits) == 2  # the discarded run, and the round
    np.testing.assert_allclose(program.seconds, [(10e-6 + 13 * 1e-3 + 500e-6) / 13])
