"""Exit codes and messages of commands."""

import functools
import re
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from brl_jax import local_attention
from tests.support.processes import python, started
from train.cli.command import command

_INTERRUPTED = """
import gc, signal, sys, time
from train.cli.command import command

def main(argv):
    sent = []

    def callback(phase, info):  # as JAX's, whose exceptions Python ignores
        if not sent:
            sent.append(phase)
            signal.raise_signal(signal.{signum})

    gc.callbacks.append(callback)
    gc.collect()
    assert sent
    for _ in range(1000):
        time.sleep(0.01)

signal.signal(signal.SIGINT, signal.{handler})
if "{signum}" == "SIGTERM":  # as `eval.speed` does
    signal.signal(signal.SIGTERM, signal.default_int_handler)
hook = sys.unraisablehook
status = command(main, "name")
assert sys.unraisablehook is hook
sys.exit(status)
"""


@pytest.mark.parametrize("name", ["train.lm", "eval.lm"])
def test_without_the_extra_a_command_says_so(name):
    result = python("-S", "-m", name, "--help")  # -S: without the folder of installed packages
    message = f"{name}: the module optax is missing: pip install -e '.[train]'\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)


@pytest.mark.slow
def test_a_platform_that_jax_does_not_have(tmp_path):
    words = ("--steps", "1", "--workdir", str(tmp_path / "run"))
    result = python("-m", "train.lm", *words, JAX_PLATFORMS="gppu")
    assert result.returncode == 2
    assert re.fullmatch("train.lm: JAX finds no devices with JAX_PLATFORMS=gppu: .*'gppu'.*\n", result.stderr)
    assert not (tmp_path / "run").exists()


def test_a_kernel_of_another_platform(capsys):
    """The error comes when the program is lowered, long after the options were read."""
    x = jnp.zeros((1, 8, 1, 8))

    def main(argv):
        jax.jit(functools.partial(local_attention, local_window_size=1, implementation="pallas"))(x, x, x)

    assert command(main, "name") == 2
    expected = "name: local_attention with implementation='pallas' runs on the platform 'tpu' alone, .*\n"
    assert re.fullmatch(expected, capsys.readouterr().err)


# `train/__init__.py` sets SIG_DFL during the imports.
@pytest.mark.parametrize(
    ("handler", "signum"), [("default_int_handler", "SIGINT"), ("SIG_DFL", "SIGINT"), ("SIG_IGN", "SIGTERM")]
)
def test_an_interrupt_in_the_garbage_collector_is_not_lost(handler, signum):
    program = _INTERRUPTED.replace("{handler}", handler).replace("{signum}", signum)
    result = python("-c", program)
    assert (result.returncode, result.stderr) == (130, "name: stopped\n")


def test_an_interrupt_while_the_process_ends_prints_nothing():
    program = (
        "import atexit, signal; from train.cli.command import start; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "atexit.register(signal.raise_signal, signal.SIGINT); start(lambda argv: None, 'name')"
    )
    result = python("-c", program)
    assert (result.returncode, result.stderr) == (-signal.SIGINT, "")


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="Linux alone lists what a process has loaded"
)
@pytest.mark.parametrize("name", ["train.lm", "eval.lm"])
def test_an_interrupt_during_the_imports_prints_nothing(name):
    # Background jobs inherit an ignored SIGINT.
    start = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        f"os.execv(sys.executable, [sys.executable, '-m', '{name}', '--help'])"
    )
    process = started("-c", start)
    maps = Path(f"/proc/{process.pid}/maps")
    # NumPy's library is one of the first to load.
    while process.poll() is None and "_multiarray_umath" not in maps.read_text():
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (-signal.SIGINT, "", "")
