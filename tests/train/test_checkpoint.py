import json
import shutil
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support.texts import full_disk
from train.engine.checkpoint import Checkpoints
from train.engine.errors import RunError, UserError
from train.engine.step import TrainState


def _state(seed):
    rng = np.random.default_rng(seed)
    return TrainState(
        step=jnp.asarray(seed, jnp.int32),
        params={
            "w": jnp.asarray(rng.normal(size=(64, 33)), jnp.float32),
            "b": jnp.asarray(rng.normal(size=5), jnp.bfloat16),
        },
        opt_state=({"mu": jnp.asarray(rng.normal(size=3), jnp.float32)}, (), jnp.asarray(seed, jnp.int32)),
        key=jnp.asarray([seed, 7], jnp.uint32),
        memory={"past": jnp.asarray(rng.integers(9, size=(2, 4)), jnp.int32), "none": None},
    )


def _equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def _write(folder, steps, keep=5, losses=None):
    checkpoints = Checkpoints(folder, keep=keep)
    for step in steps:
        checkpoints.save(step, _state(step), {"config": {}, "at": step}, score=(losses or {}).get(step))
    checkpoints.wait()
    checkpoints.close()


def _restore(folder, said=None, check=lambda meta: None):
    return Checkpoints(folder, log=(lambda line: None) if said is None else said.append).restore(
        _state(0), check
    )


def test_the_last_few_and_the_best_are_kept(tmp_path):
    _write(tmp_path, range(1, 8), keep=2, losses={1: 5.0, 2: 3.0, 4: 4.0, 6: 3.5})
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [2, 6, 7]
    assert checkpoints.choose("best") == [2]


def test_a_step_saved_again_keeps_its_arrays_on_the_disk(tmp_path):
    """The process was interrupted while it evaluated; the next one finishes the evaluation."""
    _write(tmp_path, [4])
    written = {path: path.stat().st_ino for path in (tmp_path / "4").rglob("*") if path.is_file()}
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(4, _state(4), {"config": {}, "at": "the end"}, score=1.0)
    checkpoints.wait()
    checkpoints.close()
    changed = [path for path, inode in written.items() if path.stat().st_ino != inode]
    assert changed == [tmp_path / "4" / "meta" / "metadata"]
    restored = _restore(tmp_path)
    _equal(restored.state, _state(4))
    assert restored.meta["at"] == "the end"
    assert checkpoints.choose("best") == [4]


def test_a_full_disk_spares_a_step_saved_again(tmp_path, monkeypatch):
    _write(tmp_path, [4])

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("train.engine.checkpoint.write_whole", full)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.restore(_state(0), lambda meta: None)
    with pytest.raises(RunError, match=f"No space left.*last good checkpoint: {tmp_path / '4'}"):
        checkpoints.save(4, _state(4), {"config": {}}, score=1.0)
    checkpoints.close()
    assert _restore(tmp_path).meta["at"] == 4


def _largest(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def _truncate(folder):
    path = _largest(folder / "params")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _cut_meta(folder):
    path = folder / "meta" / "metadata"
    path.write_text(path.read_text()[:-5])


def _meta_of(content):
    return lambda folder: (folder / "meta" / "metadata").write_text(content)


DAMAGES = {
    "null as meta": _meta_of("null"),
    "an empty meta": _meta_of("{}"),
    "an infinite score": _meta_of('{"score": 1e999}'),
    "truncated": _truncate,
    "no params": lambda folder: shutil.rmtree(folder / "params"),
    "no rest": lambda folder: shutil.rmtree(folder / "rest"),
    "no meta": lambda folder: shutil.rmtree(folder / "meta"),
    "meta cut": _cut_meta,
    "empty": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path, damage):
    folder = tmp_path / "checkpoints"
    _write(folder, [5, 9], losses={9: 1.0})
    DAMAGES[damage](folder / "9")
    said = []
    restored = _restore(folder, said)
    assert restored.step == 5
    _equal(restored.state, _state(5))
    assert len(said) == 1
    assert str(folder / "9") in said[0]
    assert "damaged" in said[0]
    assert "\n" not in said[0]
    # The damaged one has been moved away, so the run can save that step again.
    assert (tmp_path / "damaged_checkpoints" / "9").exists()
    _write(folder, [9])
    _equal(_restore(folder).state, _state(9))


@pytest.mark.parametrize("times", [1, 2])
def test_what_another_process_cannot_read_is_skipped_by_all(tmp_path, monkeypatch, times):
    """Each process reads its own parts of the arrays; otherwise they would go on from different steps. The other one
    does not see the newest checkpoint's folder yet, and cannot read its metadata, or its arrays."""
    _write(tmp_path / "checkpoints", [5, 9])
    others = iter([[5]] + [None] * (times - 1) + [[False, "cut"]] + [None] * 2)
    monkeypatch.setattr("train.engine.checkpoint.gather", lambda own: [own, next(others)])
    said = []
    assert _restore(tmp_path / "checkpoints", said).step == 5
    assert "9 is damaged or half-written (cut)" in said[0]


def test_a_step_that_is_damaged_again_leaves_the_first_copy_alone(tmp_path):
    folder = tmp_path / "checkpoints"
    _write(folder, [5])
    for copies in (1, 2):
        _write(folder, [9])
        DAMAGES["no meta"](folder / "9")
        assert _restore(folder, []).step == 5
        assert len(list((tmp_path / "damaged_checkpoints").iterdir())) == copies


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "denied"),
        ConnectionError("reset"),
        ValueError("UNAVAILABLE: error reading gs://b/run"),
    ],
)
def test_storage_that_does_not_answer_is_not_damage(tmp_path, monkeypatch, error):
    """Whether it fails while reading metadata or arrays, nothing is moved."""
    folder = tmp_path / "checkpoints"
    _write(folder, [5, 9])

    def refuse(*_, **__):
        raise error

    for reader in ("read_meta", "read_arrays"):
        with monkeypatch.context() as patch:
            patch.setattr(f"train.engine.checkpoint.{reader}", refuse)
            with pytest.raises(RunError, match=r"cannot read checkpoint .*/9: .*; nothing was changed"):
                _restore(folder)
    assert not (tmp_path / "damaged_checkpoints").exists()
    assert _restore(folder).step == 9


def test_the_best_is_known_to_the_next_run_and_a_damaged_one_is_not_it(tmp_path):
    _write(tmp_path, [5, 7, 9], losses={5: 2.0, 7: 1.0, 9: 1.5})
    _cut_meta(tmp_path / "7")
    _write(tmp_path, [11, 12], keep=1, losses={11: 3.0})
    assert Checkpoints(tmp_path).steps() == [9, 12]
    assert Checkpoints(tmp_path).choose("best") == [9]


def test_a_half_written_checkpoint_is_ignored_and_other_folders_are_left_alone(tmp_path):
    """This program never writes a step under such a name."""
    assert _restore(tmp_path / "none") is None
    assert not (tmp_path / "none").exists()
    _write(tmp_path, [5])
    shutil.copytree(tmp_path / "5", tmp_path / "9.orbax-checkpoint-tmp-123")
    others = {"007", "7b", "-7"}
    for name in others:
        (tmp_path / name).mkdir()
    said = []
    assert _restore(tmp_path, said).step == 5
    assert len(said) == 1
    assert "half-written" in said[0]
    _write(tmp_path, [9])
    assert Checkpoints(tmp_path).steps() == [5, 9]
    assert {path.name for path in tmp_path.iterdir()} == {"5", "9"} | others


def test_no_intact_checkpoint_is_an_error_and_nothing_is_moved(tmp_path):
    _write(tmp_path, [5])
    _truncate(tmp_path / "5")
    with pytest.raises(UserError, match=f"--workdir: no intact checkpoint in {tmp_path}"):
        _restore(tmp_path)
    assert (tmp_path / "5").exists()


def _read_params(folder, which="5"):
    return Checkpoints(folder).read_params(lambda key: _state(0).params, which)


def test_params_alone(tmp_path):
    _write(tmp_path, [4, 5])
    step, params = _read_params(tmp_path)
    assert step == 5
    _equal(params, _state(5).params)
    _truncate(tmp_path / "5")
    with pytest.raises(UserError, match=r"5 is damaged \(.*\); there are also 4$"):
        _read_params(tmp_path)


class _Unraisable:
    """Raises when it is deleted, where nobody can catch the error."""

    def __init__(self, error):
        self.error = error

    def __del__(self):
        raise self.error


@pytest.mark.parametrize(
    ("method", "call", "error"),
    [
        ((ocp.Checkpointer, "restore"), _read_params, "5 is damaged"),
        ((ocp.CheckpointManager, "save"), lambda folder: _write(folder, [6]), "cannot write a checkpoint"),
    ],
)
def test_tasks_abandoned_after_an_error_end_silently(tmp_path, monkeypatch, method, call, error):
    """While the error of one array propagates, TensorStore's threads find the event loop closed."""
    seen = []

    def abandon(*_, **__):
        _Unraisable(RuntimeError("Event loop is closed"))
        _Unraisable(ValueError("something else"))
        raise ValueError("damaged")

    _write(tmp_path, [5])
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(str(unraisable.exc_value)))
    monkeypatch.setattr(*method, abandon)
    with pytest.raises((UserError, RunError), match=error):
        call(tmp_path)
    assert seen == ["something else"]


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write a checkpoint under .*; last good checkpoint: none"):
        Checkpoints(tmp_path / "file" / "checkpoints").save(1, _state(1), {"config": {}})


def _save_and_wait(checkpoints, step):
    checkpoints.save(step, _state(step), {"config": {}})
    checkpoints.wait()


def _save_and_check(checkpoints, step):
    checkpoints.save(step, _state(step), {"config": {}})
    end = time.monotonic() + 60
    while time.monotonic() < end:
        checkpoints.check()
        time.sleep(0.01)


@pytest.mark.parametrize("save", [_save_and_wait, _save_and_check])
def test_a_full_disk_is_told_with_the_last_good_checkpoint(tmp_path, save):
    checkpoints = Checkpoints(tmp_path)
    _save_and_wait(checkpoints, 1)
    checkpoints.check()
    message = f"; last good checkpoint: {tmp_path / '1'}"
    with full_disk(1000), pytest.raises(RunError, match=message) as caught:
        save(checkpoints, 2)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]  # nothing half-written takes the disk's room
    assert _restore(tmp_path).step == 1
    json.dumps(str(caught.value))
