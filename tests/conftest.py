"""Every test runs with strict promotion rules, so silent upcasts and broadcasts fail.

Tests check what programs mean but spend their time in the compiler, so it skips most optimizations, also in
subprocesses (on a CPU, its emitters of fused loops alone take most of the time). Compiled programs are cached in
.pytest_cache/xla for the next run of the same tests. Each worker has a separate folder, since it must not read what
another is writing.

Tracing makes millions of objects and little garbage, so frequent garbage collection wastes about a tenth of the
time."""

import functools
import gc
import os
from pathlib import Path

import jax
import jaxtyping
import pytest

from tests.support import gpu
from tests.support.devices import Devices
from tests.support.sampling import group_of, left_out, this_week

# tests/attention/test_shapes.py asks for checks of shapes and dtypes in signatures at every call. They are off
# otherwise, because the checker would raise the errors of bad calls itself.
if os.environ.get("BRL_JAX_CHECK_SHAPES"):
    jaxtyping.install_import_hook(["brl_jax.attention"], "beartype.beartype")

gc.set_threshold(100_000, 20, 10)
if jax.__version_info__ < (
    0,
    11,
):  # XLA has only these emitters from there on, and aborts at an unknown flag
    _QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK}"
# A LAPACK triangular solve occupies a thread of XLA's pool and waits for another. With two threads, two solves at
# a time wait forever (jaxlib 0.10.2).
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "alone")
jax.config.update(
    "jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".pytest_cache" / "xla" / _WORKER)
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# Groups whose tests wait for a process of many devices or for a run, by name. They run first; at the end of the suite,
# all other workers would wait for them.
_PROCESSES = ("devices", "train.lm")


def pytest_addoption(parser):
    parser.addoption(
        "--cases",
        type=float,
        metavar="N",
        help="at most N cases of each test, chosen by the week (0: all; 0.5: one case of about half of the tests)",
    )
    parser.addoption("--cases-of", default=this_week(), metavar="WEEK", help="the week that chooses --cases")


def pytest_configure(config):
    if gpu.is_native(config):
        gpu.prepare(config)
    if config.option.cases is None:  # workers get the value of the process that starts them
        whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
        config.option.cases = 0.5 if whole and not gpu.is_native(config) else 0


def pytest_itemcollected(item):
    """Groups the tests that share fixtures of their module; otherwise each worker would make these fixtures."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    if group_of(item) is None and any(found[-1].scope == "module" for found in fixtures):
        item.add_marker(pytest.mark.xdist_group(item.module.__name__))


def pytest_report_header(config):
    cases, chosen = config.getoption("cases"), config.getoption("cases_of")
    return f"cases: {cases:g} of each test, --cases-of {chosen}" if cases else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leaves out some cases of each test if asked to, and puts tests with processes first."""
    if config.getoption("cases"):
        others = left_out(items, config.getoption("cases"), config.getoption("cases_of"))
        config.hook.pytest_deselected(items=others)
        others = set(others)
        items[:] = [item for item in items if item not in others]

    def late(item):
        name = group_of(item)
        return _PROCESSES.index(name) if name in _PROCESSES else len(_PROCESSES)

    items.sort(key=late)


@pytest.fixture(scope="session")
def devices():
    """A process of eight devices; its tests belong to the group "devices"."""
    process = Devices()
    yield process
    process.close()


@pytest.fixture
def result(devices, request):
    """What these devices compute for a part of the test's module."""
    return functools.partial(devices.ask, request.module.__name__)


@pytest.fixture
def uncached():
    """Programs for absent chips could be written to the compilation cache, but not read back."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
