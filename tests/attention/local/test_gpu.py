"""What `local_attention` says where its GPU kernel cannot serve a call. Its numbers: tests/pallas_kernels/gpu."""

import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from brl_jax import ALiBi, Fixed, SlidingWindow, Strided, alibi_slopes, local_attention

X = jnp.ones((1, 16, 2, 8))


def call(**options):
    pattern = options.pop("pattern", SlidingWindow(3, 0))
    return local_attention(X, X, X, pattern=pattern, implementation="triton", **options)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match=r"triton and jax_triton must be installed \(pip install"):
        call()


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": Strided(4)}, "pattern must touch few blocks of keys, and the columns of Strided"),
        ({"pattern": Fixed(4)}, "the columns of Fixed touch all of them"),
        ({"bias": ALiBi(alibi_slopes(2))}, "bias must be None, got ALiBi"),
    ],
)
def test_what_the_kernel_cannot_serve(options, message):
    with pytest.raises(
        NotImplementedError, match=f"local_attention with implementation='triton': .*{message}"
    ):
        call(**options)


@pytest.mark.usefixtures("installed")
def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setenv("BRL_JAX_GPU_CAPABILITY", "75")
    with pytest.raises(NotImplementedError, match=r"compute capability 8\.0 or more, got 7\.5"):
        call()


@pytest.mark.usefixtures("installed")
def test_interpretation_is_chosen_for_a_process(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(NotImplementedError, match="TRITON_INTERPRET=1 must be set before Triton is imported"):
        local_attention(X, X, X, local_window_size=3, implementation="triton_interpret")


def test_the_default_does_not_ask_for_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    jax.jit(lambda x: local_attention(x, x, x, local_window_size=3)).trace(X).lower(
        lowering_platforms=("cuda",)
    )


def test_importing_the_library_imports_no_kernels():
    """A GPU user's start would otherwise wait for Triton, and its interpreter could no longer be chosen."""
    code = (
        "import sys, jax.numpy as jnp, brl_jax\n"
        "x = jnp.ones((1, 4, 2, 8))\n"
        "brl_jax.propagate(x, x, x, strength=0.5, implementation='xla')\n"
        "loaded = [name for name in ('pallas_kernels.gpu', 'triton') if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
