"""XLA's options for NVIDIA GPUs, which commands set before anything is compiled."""

import os
import sys

import pytest

from train.cli.command import set_gpu_options


@pytest.fixture
def plugins(monkeypatch, tmp_path):
    """A folder that JAX would take its plugins from."""
    folder = tmp_path / "jax_plugins"
    folder.mkdir()
    (folder / "__init__.py").touch()  # hides plugins that are installed
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    sys.modules.pop("jax_plugins", None)


def test_set_where_a_plugin_for_nvidia_gpus_is_installed(plugins, monkeypatch):
    (plugins / "xla_cuda13").mkdir()
    (plugins / "xla_cuda13" / "__init__.py").touch()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    set_gpu_options()
    assert os.environ["XLA_FLAGS"].split() == [
        "--xla_gpu_enable_triton_gemm=true",
        "--xla_gpu_enable_dynamic_slice_fusion=false",
    ]


def test_not_set_elsewhere(plugins, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    set_gpu_options()
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2"
