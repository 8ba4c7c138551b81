"""`pytest -m gpu`: the tests of the GPU kernels, run natively on this machine's GPU."""

import os

import jax
import pytest

from eval.chips import gpu_worker
from pallas_kernels.triton.core import bridge


def is_native(config):
    """Whether this is a run of `-m gpu`. With TRITON_INTERPRET=1 it interprets the same tests in its own process."""
    return config.option.markexpr == "gpu"


def prepare(config):
    """Sets up a run of `-m gpu`. Without a GPU it ends the run in one line."""
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # Triton 3.9 warns without it
    os.environ["BRL_JAX_LAWS_IMPLEMENTATION"] = "triton_interpret" if bridge.interprets() else "triton"
    if config.option.dist == "loadgroup":
        config.option.dist = (
            "load"  # a group's tests share nothing here, and one worker would have most of them
        )
    if bridge.interprets():
        return
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # workers share the GPU
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    jax.config.update("jax_default_matmul_precision", "highest")  # XLA's float32 is TF32 otherwise
    if not config.option.collectonly and (greeting := gpu_worker.hello())["event"] == "refused":
        pytest.exit(f"nothing ran: {greeting['why']}", returncode=0)
