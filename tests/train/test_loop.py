import itertools
import math
import signal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.marks import slow_unless
from tests.support.logs import measured_lines, metrics_lines
from tests.train.toy import OBJECTIVE, OPTIMIZER, ToyHeldOut, ToyStream, batch_of, loop_config
from train.engine.checkpoint import Checkpoints
from train.engine.config_file import differences
from train.engine.errors import RunError, Stopped, UserError, is_memory_shortage
from train.engine.evaluation import evaluate, held_out_metrics
from train.engine.loop import train
from train.engine.metrics import MetricsLog
from train.engine.signals import Signals
from train.engine.step import Objective, make_eval_step


def _train(workdir, *, stream=None, held_out=None, full=None, objective=OBJECTIVE, config=None, **changes):
    config = {"loop": {"seed": 0}} if config is None else config
    loop = loop_config(workdir, **changes)
    config = {**config, "loop": {**config["loop"], "steps": loop.steps}}
    return train(
        objective,
        loop,
        OPTIMIZER,
        config=config,
        differences=lambda old: differences(old, config, ("loop.steps",)),
        stream=stream or ToyStream(),
        held_out=held_out or ToyHeldOut(),
        full_held_out=full or held_out or ToyHeldOut(),
    ).state


def _sigterm():
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("never_stopped")
    state = _train(workdir)
    return measured_lines(workdir), state


def test_a_whole_run(never_stopped):
    lines, state = never_stopped
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["step"] for line in lines if "val_loss" in line] == [4, 8, 12]
    assert lines[-1]["val_loss"] < lines[3]["val_loss"] < math.log(7) + 0.1
    for line in lines:
        if "val_loss" in line:
            # 18 targets, 20 bytes
            assert line["val_bits_per_byte"] == pytest.approx(line["val_loss"] * 18 / math.log(2) / 20)
    assert int(state.step) == 12


def test_steps_in_one_call_are_single_steps_bit_for_bit(tmp_path, never_stopped):
    """Three steps, one, two, two, one and three, up to the checkpoints and evaluations; stopped by a signal that comes
    with the second batch of the first call, and resumed."""
    expected, final = never_stopped
    with pytest.raises(Stopped, match="after step 3 of 12"):
        _train(tmp_path, dispatch=5, stream=ToyStream(at={1: _sigterm}))
    assert [line["goodput"] for line in metrics_lines(tmp_path)] == [0.0] * 3  # this call compiles
    state = _train(tmp_path, dispatch=5)
    assert measured_lines(tmp_path) == expected
    jax.tree.map(np.testing.assert_array_equal, state, final)


def test_steps_in_one_call_need_batches_of_one_shape(tmp_path):
    class Growing(ToyStream):
        def __next__(self):
            self.rows += 2
            return super().__next__()

    with pytest.raises(UserError, match="--dispatch: expected 1"):
        _train(tmp_path, dispatch=2, stream=Growing())


@pytest.mark.parametrize("stop", slow_unless([1, 4, 7], (4,)))
def test_a_run_stopped_at_any_step_goes_on_bit_for_bit(tmp_path, never_stopped, stop):
    expected, final = never_stopped
    with pytest.raises(
        Stopped, match=f"after step {stop} of 12; last good checkpoint: .*/{stop}; "
    ) as caught:
        _train(tmp_path, stream=ToyStream(at={stop - 1: _sigterm}))
    assert caught.value.signum == signal.SIGTERM
    assert [line["step"] for line in measured_lines(tmp_path)] in (
        list(range(1, stop + 1)),
        list(range(1, stop)),
    )
    state = _train(tmp_path)
    assert measured_lines(tmp_path) == expected
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(final), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_moments_of_the_gradients_go_on_too(tmp_path):
    """They are logged, checkpointed and resumed bit for bit, change nothing else, and the option keeps its value."""

    def run(folder, **kwargs):
        changes = {"log_gradient_std": True, "steps": 6}
        return _train(tmp_path / folder, config={"loop": {"log_gradient_std": True}}, **changes, **kwargs)

    state = run("whole")
    with pytest.raises(Stopped):
        run("stopped", stream=ToyStream(at={1: _sigterm}))
    resumed = run("stopped")
    for ours, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    names = ("step", "grad_norm", "grad_rsd", "grad_rsd_tensors")
    logged = [[line[name] for name in names] for line in metrics_lines(tmp_path / "whole")]
    assert [[line[name] for name in names] for line in metrics_lines(tmp_path / "stopped")] == logged
    norms = [line["grad_norm"] for line in metrics_lines(tmp_path / "whole")]
    assert logged[-1][2] == pytest.approx(np.std(norms) / np.mean(norms), rel=1e-4)

    without = _train(tmp_path / "without", steps=6)
    for ours, theirs in zip(jax.tree.leaves(without.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert without.moments is None
    with pytest.raises(UserError, match="log_gradient_std True -> False"):
        _train(tmp_path / "whole", config={"loop": {"log_gradient_std": False}}, steps=7)


@pytest.mark.parametrize("batch", slow_unless([0, 2], (2,)))
def test_a_run_stopped_in_an_evaluation_makes_up_for_it(tmp_path, never_stopped, batch):
    expected, _ = never_stopped
    fired = []

    def once():
        if not fired:
            fired.append(True)
            _sigterm()

    # The signal comes while batch `batch` of three is fetched, and the evaluation stops there.
    with pytest.raises(Stopped):
        _train(tmp_path, held_out=ToyHeldOut(at={batch: once}))
    assert [line["step"] for line in measured_lines(tmp_path)] == [1, 2, 3]
    _train(tmp_path)
    assert measured_lines(tmp_path) == expected


def test_a_crash_goes_back_to_the_last_checkpoint(tmp_path, never_stopped):
    expected, _ = never_stopped

    def crash():
        raise RuntimeError("crash")

    stream = ToyStream(at={7: crash})
    with pytest.raises(RuntimeError, match="crash"):
        _train(tmp_path, stream=stream)
    assert stream.closed
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    _train(tmp_path)
    assert measured_lines(tmp_path) == expected


def test_a_checkpoint_comes_after_the_lines_up_to_it(tmp_path, monkeypatch):
    order = []

    def noting(kind, name, what):
        method = getattr(kind, name)

        def noted(self, *args, **kwargs):
            order.append(what)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, noted)

    noting(MetricsLog, "sync", "lines")
    noting(Checkpoints, "save", "checkpoint")
    _train(tmp_path, steps=4)
    assert order[:2] == ["lines", "checkpoint"]


@pytest.mark.slow
def test_another_configuration_is_refused_and_nothing_changes(tmp_path):
    old = {"loop": {"seed": 0}, "optimizer": {"learning_rate": 0.1}}
    _train(tmp_path, config=old, steps=3)
    files = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    new = {"loop": {"seed": 1}, "optimizer": {"learning_rate": 0.2}}
    with pytest.raises(UserError, match=r"seed 0 -> 1, learning_rate 0\.1 -> 0\.2") as caught:
        _train(tmp_path, config=new)
    assert "steps" not in str(caught.value)
    assert files == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(UserError, match=r"--steps must be at least 3, the step of the run in .*, got 2"):
        _train(tmp_path, config=old, steps=2)
    assert files == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    _train(tmp_path, config=old, steps=4)


@pytest.mark.parametrize(
    ("where", "bad"),
    slow_unless(
        itertools.product(("loss", "gradient"), (math.nan, math.inf)),
        (("loss", math.nan), ("gradient", math.inf)),
    ),
)
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, bad, where):
    def loss(params, memory, batch, key):
        total, weight, memory = OBJECTIVE.loss(params, memory, batch, key)
        # Only batch 7 (step 8) has the token that triggers it.
        poison = jnp.where(jnp.any(batch["tokens"] == 100), bad, 0.0)
        weight_of = jnp.sum(params["table"]) if where == "gradient" else 1.0
        extra = poison * (weight_of - jax.lax.stop_gradient(weight_of)) if where == "gradient" else poison
        return total + jnp.where(poison == 0.0, 0.0, extra), weight, memory

    class Poisoned(ToyStream):
        def __next__(self):
            batch = super().__next__()
            return batch.with_arrays(tokens=np.where(self.step == 8, 100, batch["tokens"]).astype(np.int32))

    objective = Objective(OBJECTIVE.init, loss, OBJECTIVE.init_memory)
    with pytest.raises(RunError, match=r"step 8: \w+ is (nan|inf); last good checkpoint: .*/checkpoints/6$"):
        _train(tmp_path, objective=objective, stream=Poisoned())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "6"]
    assert [line["step"] for line in measured_lines(tmp_path)] == list(range(1, 8))
    assert all(math.isfinite(value) for line in measured_lines(tmp_path) for value in line.values())


def test_a_held_out_loss_that_is_not_finite_stops_the_run(tmp_path):
    def loss(params, memory, batch, key):
        total, weight, memory = OBJECTIVE.loss(params, memory, batch, key)
        return total + (jnp.inf if key is None else 0.0), weight, memory

    with pytest.raises(RunError, match=r"step \d+: val_loss is inf; last good checkpoint: "):
        _train(tmp_path, objective=Objective(OBJECTIVE.init, loss, OBJECTIVE.init_memory))


def test_checkpoints_are_compared_on_the_same_data(tmp_path):
    """The last evaluation reports on more data, here different data with a higher loss."""

    class Harder(ToyHeldOut):
        def __iter__(self):
            for batch in super().__iter__():
                yield batch.with_arrays(targets=batch["tokens"])

    _train(tmp_path, full=Harder())
    losses = [line["val_loss"] for line in measured_lines(tmp_path) if "val_loss" in line]
    assert losses[2] > losses[0] > losses[1]
    assert Checkpoints(tmp_path / "checkpoints").choose("best")[0] == 12


def test_a_workdir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--workdir: cannot write under .*/file/run: Not a directory"):
        _train(tmp_path / "file" / "run")


def test_metrics_that_cannot_be_written_end_the_run_with_its_last_checkpoint(tmp_path, monkeypatch):
    write = MetricsLog.write

    def until_the_disk_is_full(self, line):
        if line["step"] == 8:
            raise OSError(28, "No space left on device")
        write(self, line)

    monkeypatch.setattr(MetricsLog, "write", until_the_disk_is_full)
    words = f"cannot write metrics under {tmp_path}: .*No space left on device; last good checkpoint: .*/6$"
    with pytest.raises(RunError, match=words):
        _train(tmp_path)


def test_a_checkpoint_that_was_not_written_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    saved = []

    def wait_until_finished(self):
        if saved:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(ocp.CheckpointManager, "save", lambda self, step, **_: saved.append(step))
    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", wait_until_finished)
    with pytest.raises(RunError, match=r"No space left on device; last good checkpoint: none$"):
        _train(tmp_path, eval_every=4, checkpoint_every=4, steps=8)
    assert saved == [4] == [line["step"] for line in measured_lines(tmp_path)][-1:]


def test_a_state_beyond_the_memory_is_an_error(tmp_path):
    """Unless init waits for the whole state, this hangs."""

    def init(key):
        return OBJECTIVE.init(key) | {"large": jax.random.normal(key, (2**23, 2**23))}  # beyond any address

    objective = Objective(init, lambda params, *rest: OBJECTIVE.loss(params, *rest), OBJECTIVE.init_memory)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory") as caught:
        _train(tmp_path, objective=objective)
    assert is_memory_shortage(caught.value)
    assert not list(tmp_path.iterdir())


def test_evaluation_carries_the_memory(tmp_path):
    params = nn.unbox(OBJECTIVE.init(jax.random.key(0)))
    sums = evaluate(jax.jit(make_eval_step(OBJECTIVE)), OBJECTIVE, params, ToyHeldOut())
    past, expected = np.zeros(2, np.int32), 0.0
    for i in range(3):
        batch = batch_of(1000 + i, 2)
        logits = np.asarray(params["table"], np.float64)[batch["tokens"]]
        logits = logits + np.asarray(params["past"], np.float64)[past][:, None]
        chosen = np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        expected += (np.log(np.exp(logits).sum(-1)) - chosen).sum()
        past = batch["tokens"][:, -1]
    assert sums == {"loss": pytest.approx(expected, rel=1e-5), "weight": 18.0}
    metrics = held_out_metrics(sums, 9)
    assert metrics["val_loss"] == pytest.approx(expected / 18)
    assert metrics["val_bits_per_byte"] == pytest.approx(expected / math.log(2) / 9)


def _all_alike():
    """An objective that scores the same in every evaluation."""

    def loss(params, memory, batch, key):
        total, weight, memory = OBJECTIVE.loss(params, memory, batch, key)
        return total, weight, memory, {"score": weight}

    return Objective(OBJECTIVE.init, loss, OBJECTIVE.init_memory, averages=("score",), best="score")


@pytest.mark.parametrize(("patience", "last"), slow_unless([(1, 4), (2, 6), (3, 8)], (2,)))
def test_patience_counts_the_evaluations_that_are_no_better(tmp_path, patience, last):
    """The first evaluation is the best; all later ones equal it."""
    _train(tmp_path, objective=_all_alike(), steps=20, eval_every=2, patience=patience)
    lines = metrics_lines(tmp_path)
    assert [line["step"] for line in lines if "val_score" in line] == list(range(2, last + 1, 2))
    assert lines[-1]["step"] == last


@pytest.mark.slow
def test_a_run_that_patience_ended_stays_ended(tmp_path):
    """Stopped and restarted, it ends at the same step; without patience it goes on."""
    settings = {"objective": _all_alike(), "steps": 20, "eval_every": 2}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    _train(whole, patience=2, **settings)
    lines = metrics_lines(whole)
    _train(whole, patience=2, **settings)
    assert metrics_lines(whole) == lines
    assert {path.name for path in (whole / "checkpoints").iterdir()} >= {"2", "6"}
    with pytest.raises(Stopped):
        _train(stopped, stream=ToyStream(at={4: _sigterm}), patience=2, **settings)
    _train(stopped, patience=2, **settings)
    assert metrics_lines(stopped)[-1]["step"] == 6
    _train(whole, **settings | {"steps": 8})
    assert metrics_lines(whole)[-1]["step"] == 8


def test_a_run_that_patience_ends_is_evaluated_on_all_data(tmp_path):
    """So is a run that reaches its last step. Bits per byte divide by the larger data's bytes."""

    class More(ToyHeldOut):
        num_bytes = 2_000

    def bits_and_loss(line):
        return line["val_bits_per_byte"] / line["val_loss"]

    objective = _all_alike()
    _train(tmp_path, objective=objective, full=More(), steps=40, eval_every=2, patience=2)
    lines = [line for line in measured_lines(tmp_path) if "val_loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert bits_and_loss(lines[0]) == pytest.approx(bits_and_loss(lines[1]))
    assert bits_and_loss(lines[0]) == pytest.approx(100 * bits_and_loss(lines[2]))


def test_a_run_keeps_to_the_held_out_data_that_it_was_started_with(tmp_path):
    """Otherwise it would choose its best checkpoint by scores on different data."""

    class Read(ToyHeldOut):
        def __init__(self, digest):
            super().__init__()
            self.digest = digest

    _train(tmp_path, held_out=Read("a"), steps=4)
    with pytest.raises(UserError, match=r"--workdir: the run in .* was started with other held-out data"):
        _train(tmp_path, held_out=Read("b"), steps=8)
    _train(tmp_path, held_out=Read("a"), steps=8)
    assert measured_lines(tmp_path)[-1]["step"] == 8


def test_signals_are_noted_and_handlers_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        assert signals.received is None
        signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGINT
        # The next Ctrl-C goes to the system's handler.
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
