"""Progress of long work without a terminal, and which of a run's metrics reach the disk."""

import json
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from tests.support.texts import full_disk
from train.engine import metrics, trackers


def test_making_of_many_pieces_says_how_far_it_is(monkeypatch, capsys):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(metrics.Progress, "update", lambda *_, **__: None)  # a bar asks for the time too
    pieces = zip("abcde", [250, 250, 250, 250, 40])
    assert list(metrics.tracked(pieces, 1040, "images, train")) == list("abcde")
    # After 12 and 24 seconds, at 6 seconds each.
    assert capsys.readouterr().err.splitlines() == [
        "images, train: 500 of 1,040  0:00:13 left",
        "images, train: 1,000 of 1,040  0:00:01 left",
    ]


def test_a_run_says_at_its_first_step_and_now_and_then_how_far_it_is(monkeypatch, capsys):
    """The first step, which compiles, says nothing about the others."""
    clock = iter([100, 104, 116, 117])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    reporter = metrics.Reporter(10, start=2)
    for step, more in ((3, {}), (4, {}), (5, {}), (6, {"val_loss": 0.25})):
        reporter.step({"step": step, "loss": 0.5, "tokens_per_second": 1500, **more})
    assert capsys.readouterr().err.splitlines() == [
        "step 3/10  loss 0.5000  1.5k tokens/s",
        "step 5/10  loss 0.5000  1.5k tokens/s  0:00:40 left",
        "step 6/10  loss 0.5000  1.5k tokens/s  held-out loss 0.2500  0:00:23 left",
    ]


def test_tensorboard_reads_the_events(tmp_path):
    log = metrics.MetricsLog(tmp_path, last_step=4, tensorboard=True)
    log.write({"step": 5, "loss": 0.5, "val_loss": float("1e9")})
    log.close()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    content, events = path.read_bytes(), []
    while rest := content[sum(16 + len(event) for event in events) :]:
        events.append(rest[12 : 12 + struct.unpack("<Q", rest[:8])[0]])
    version, start, step = (Event.FromString(event) for event in events)
    assert version.file_version == "brain.Event:2"
    assert start.session_log.status == SessionLog.START
    assert [event.step for event in (start, step)] == [5, 5]
    values = {value.tag: value.simple_value for value in step.summary.value}
    assert values == {"loss": 0.5, "val_loss": 1e9}


def test_events_reach_the_disk_while_the_run_goes_on(tmp_path, monkeypatch):
    log = metrics.MetricsLog(tmp_path, last_step=0, tensorboard=True)
    (path,) = tmp_path.glob("events.out.tfevents.*")
    log.write({"step": 1, "loss": 0.5})
    before = path.stat().st_size
    monkeypatch.setattr(trackers, "_SECONDS_BETWEEN_FLUSHES", -1.0)
    log.write({"step": 2, "loss": 0.5})
    after = path.stat().st_size
    log.close()
    assert before < after == path.stat().st_size


@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_full_disk_is_an_error_of_the_write_that_it_cuts_off(tmp_path, monkeypatch, tensorboard):
    """A file size limit simulates the full disk. It kills one of tensorboardX's threads, whose caller would hang."""
    monkeypatch.setattr(trackers, "_SECONDS_BETWEEN_FLUSHES", -1.0)
    log, written = metrics.MetricsLog(tmp_path, last_step=0, tensorboard=tensorboard), []

    def write_until_it_is_full():
        for step in range(1, 100):
            log.write({"step": step, "loss": 0.5, "grad_norm": 0.5, "learning_rate": 0.5})
            written.append(step)

    with full_disk(2000), pytest.raises(OSError, match=r"No space left on device|File too large"):
        write_until_it_is_full()
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[: len(written)]] == written


def test_lines_that_are_missing_are_counted(tmp_path, capsys):
    lines = [
        '{"step": 1, "loss": 0.5}',
        '{"step": 1e999, "loss": 0.5}',
        "[" * 100_000,
        '{"loss": 0.5}',
        "[1]",
        "3",
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f"{line}\n" for line in [*lines, '{"step": 3}', '{"step": 4}'])
    )
    metrics.MetricsLog(tmp_path, last_step=3, tensorboard=False).close()
    assert capsys.readouterr().err == (
        f"{tmp_path}/metrics.jsonl has no line of 1 of the 3 steps before; they stay missing\n"
    )
    assert metrics.read_metrics(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 3}]


def test_a_line_that_a_crash_left_in_pieces_is_passed_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 0.5}\n\xff\x00\n{"step": 2, "lo')
    assert metrics.read_metrics(tmp_path) == [{"step": 1, "loss": 0.5}]
    metrics.MetricsLog(tmp_path, last_step=2, tensorboard=False).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.5}\n'
