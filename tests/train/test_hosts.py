"""One run of two processes on this machine: stopped, killed, and resumed by a single process."""

import contextlib
import json
import os
import signal
import socket
import time

import jax
import numpy as np
import pytest

from tests.support.processes import python, started
from tests.support.texts import write_splits
from train.cli.main import keep_programs
from train.engine import hosts, watchdog

TINY = (
    "--batch 8 --length 16 --num_layers 1 --d_model 16 --num_heads 2 --d_ff 16 --eval_every 100000 --eval_tokens 200 "
    "--full_eval False --checkpoint_every 100000 --sample_tokens 0 --decay constant --tensorboard False "
    "--mechanism local --mechanism.window 4 --dropout 0.1"
)


def _start(workdir, text, devices, steps, *more):
    """Starts a process with `devices` CPU devices."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "compiled")}
    line = f"-m train.lm {TINY} --workdir {workdir} --data {text} --steps {steps}"
    return started(*line.split(), *more, JAX_NUM_CPU_DEVICES=str(devices), **cache)


def _start_two(workdir, text, *, others=None, more=()):
    """Starts two processes of one run; the second may get another folder and more options."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = f"--hosts.coordinator 127.0.0.1:{port} --hosts.processes 2 --hosts.process"
    return [
        _start(workdir, text, 2, 1_000_000, *hosts.split(), "0"),
        _start(others or workdir, text, 2, 1_000_000, *hosts.split(), "1", *more),
    ]


def _losses(workdir):
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    parsed = [json.loads(line) for line in lines if line.endswith("}")]
    return {line["step"]: line["loss"] for line in parsed}


def _wait_for(step, workdir, processes):
    """Waits until the run has reported a step; fails if a process ends first."""
    while max(_losses(workdir), default=0) < step:
        for process in processes:
            if process.poll() is not None:
                pytest.fail(process.stderr.read()[-3000:])
        time.sleep(0.05)


@pytest.mark.slow
def test_two_processes_stop_together_die_together_and_one_goes_on(tmp_path):
    train = " ".join(f"word{i * i % 97}" for i in range(3000))
    text, workdir = write_splits(tmp_path, train=train, valid="word1 word4 word9 " * 20), tmp_path / "run"

    # Preempt the second process: both stop after the same step, with one checkpoint.
    processes = _start_two(workdir, text)
    _wait_for(2, workdir, processes)
    processes[1].send_signal(signal.SIGTERM)
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [143, 143], errors
    [stopped] = [int(path.name) for path in (workdir / "checkpoints").iterdir()]
    for error in errors:
        assert f"train.lm: stopped after step {stopped} of" in error
    assert list(_losses(workdir)) == list(range(1, stopped + 1))

    # Run the same command again and kill the second process: the first exits with one line and doesn't wait for it.
    processes = _start_two(workdir, text)
    _wait_for(stopped + 5, workdir, processes)
    processes[1].kill()
    error = processes[0].communicate()[1]
    with contextlib.suppress(ProcessLookupError):
        processes[1].communicate()
    # Either the communication of a step fails first, or JAX notices that the other process is silent.
    assert processes[0].returncode in (1, -signal.SIGABRT), error
    assert "process 0 of 2 has lost another one" in error or "another task died" in error

    # A single process resumes from the checkpoint with the batches of both: none lost, none repeated.
    before = _losses(workdir)
    one = _start(workdir, text, 1, stopped + 5)
    error = one.communicate()[1]
    assert one.returncode == 0, error
    assert f"resuming from step {stopped} of" in error
    after = _losses(workdir)
    assert list(after) == list(range(1, stopped + 6))
    np.testing.assert_allclose(list(after.values()), [before[step] for step in after], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "same_folder", "message"),
    [
        ([], False, "process 1 of 2 does not find in {}/there what the first process wrote there"),
        (["--seed", "3"], True, "process 1 of 2 has other options than the first process: seed 0 -> 3"),
    ],
)
def test_processes_that_do_not_belong_together_end(more, same_folder, message, tmp_path):
    """Otherwise they would wait for each other for ever; with different folders, at the first checkpoint."""
    text = write_splits(tmp_path, train="alpha beta " * 300, valid="alpha beta " * 30)
    others = tmp_path / ("here" if same_folder else "there")
    processes = _start_two(tmp_path / "here", text, others=others, more=more)
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], errors
    assert message.format(tmp_path) in errors[1]
    assert "train.lm: --workdir: process 1 of 2 " in errors[0]
    assert {path.name for path in tmp_path.iterdir()} <= {"train.txt", "valid.txt", "compiled"}


@pytest.mark.slow
def test_an_error_of_the_first_process_ends_all_with_it(tmp_path):
    """It reads the data before the others do, which wait for it."""
    processes = _start_two(tmp_path / "run", f"text:{tmp_path}/none/*.txt")
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], errors
    for error in errors:
        assert error.splitlines()[-1].startswith("train.lm: --data: no file matches ")


# The main thread waits in C, as in a collective operation, so Python's signal handlers cannot run. Background jobs of a
# shell, possibly this test suite, inherit an ignored SIGINT.
_STUCK = """
import ctypes, os, signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
from train.engine import watchdog
watchdog.{limit} = 0.3
watchdog.WATCHDOG.start()
with watchdog.WATCHDOG.watching("runs/x"):
    if {signal}:
        threading.Timer(0.1, os.kill, (os.getpid(), {signal})).start()
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex), lock(mutex)
"""


@pytest.mark.parametrize(
    ("limit", "signum", "status", "line"),
    [
        ("STOP_SECONDS", signal.SIGTERM, 143, "got SIGTERM 0 seconds ago and still waits for the others"),
        pytest.param(
            "INTERRUPT_SECONDS", signal.SIGINT, 130, "got SIGINT 0 seconds ago", marks=pytest.mark.slow
        ),
        pytest.param("IDLE_SECONDS", 0, 1, "has made no step for 0 seconds", marks=pytest.mark.slow),
    ],
)
def test_a_stuck_process_ends_with_a_line(limit, signum, status, line):
    done = python("-c", _STUCK.format(limit=limit, signal=int(signum)))
    assert done.returncode == status, done.stderr
    assert f"process 0 of 1 {line}" in done.stderr
    assert done.stderr.endswith("all resume from the last checkpoint in runs/x\n")


def test_several_processes_on_cpus_keep_no_programs(monkeypatch):
    """JAX's keys differ between them and the first one alone writes, so after a restart the others compile while it
    runs, until Gloo gives up."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    before = jax.config.jax_enable_compilation_cache
    try:
        keep_programs("")
        assert not jax.config.jax_enable_compilation_cache
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def test_a_batch_script_without_srun_is_alone(monkeypatch):
    """SLURM also sets the number of tasks that srun would start."""
    for name in ("SLURM_STEP_NODELIST", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("SLURM_JOB_ID", "7"), ("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hosts.glob, "glob", lambda pattern: [])
    assert not hosts._in_a_cluster()
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-8]")
    assert hosts._in_a_cluster()
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert not hosts._in_a_cluster()


def test_ctrl_c_shortens_the_time_that_sigterm_leaves(monkeypatch):
    ended = []

    def end(reason: str, status: int) -> None:
        ended.append((reason, status))
        raise SystemExit  # `_watch` never returns otherwise

    monkeypatch.setattr(watchdog, "INTERRUPT_SECONDS", 0.0)
    reader, writer = os.pipe()
    dog = watchdog.Watchdog(end)
    with dog.watching("runs/x"):
        os.write(writer, bytes([signal.SIGTERM, signal.SIGINT, signal.SIGTERM]))
        # If the watchdog still kept SIGTERM's time, it would wait that long; this limit ends the test first.
        monkeypatch.setattr(watchdog, "IDLE_SECONDS", 1.0)
        with pytest.raises(SystemExit):
            dog._watch(reader)
    assert ended[0][1] == 130, ended
    assert "got SIGINT 0 seconds ago" in ended[0][0]
    os.close(reader), os.close(writer)
