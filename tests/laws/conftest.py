"""The laws of one case run in one process, which compiles its network once (`--dist loadgroup` in pyproject). Some of
them run with the GPU kernels too."""

from pathlib import Path

import pytest

from tests.laws.cases import CASES, ON_GPU_KERNELS


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items):
    for item in items:
        if item.name.removeprefix("test_") in ON_GPU_KERNELS:
            item.add_marker("gpu")
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")
        if name in CASES and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(name))
