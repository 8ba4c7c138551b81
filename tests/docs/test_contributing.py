"""A mechanism, a backend and a task are each added to a copy by the files that CONTRIBUTING.md names, and no others."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from brl_jax.layers.core import protocol

ROOT = Path(__file__).parents[2]
_MECHANISM = """
import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from brl_jax.attention.recurrent.mean import running_sum
from brl_jax.layers.core.modules import dense, merge_heads
from brl_jax.layers.core.protocol import Mechanism, MechanismLayer

"""
_PARITY = '''"""Trains the new task."""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.parity import PARITY

main = functools.partial(train_main, [PARITY], name="train.parity")

if __name__ == "__main__":
    start(main, "train.parity")
'''
_BACKEND = """
import jax
import jax.numpy as jnp


def unsupported(call, x):
    return None if x.bias is None else "plain takes no bias"


def attend(call, x, *, interpret):
    print("the new backend")
    positions = jnp.arange(call.num_keys)
    mask = call.pattern.visible(positions[:, None], positions)[None, None]
    return jax.nn.dot_product_attention(x.query, x.key, x.value, mask=mask, is_causal=call.is_causal, scale=call.scale)
"""
#: New files, by what is added.
NEW = {
    "mechanism": {
        "brl_jax/attention/recurrent/mean.py": (
            "import jax.numpy as jnp\n\n\ndef running_sum(x):\n    return jnp.cumsum(x, axis=1)\n"
        ),
        "brl_jax/layers/recurrent/mean.py": _MECHANISM
        + textwrap.dedent(re.search(r" +class MeanCache.*(?=To list it)", protocol.__doc__, re.DOTALL)[0]).replace(
            "jnp.cumsum(value, axis=1)", "running_sum(value)"
        ),
    },
    "backend": {"brl_jax/attention/local/plain.py": _BACKEND},
    "task": {
        "train/tasks/parity.py": re.sub(
            "from eval.*\n", "", (ROOT / "tests/train/parity.py").read_text().split("evaluation = ")[0]
        ),
        "train/parity.py": _PARITY,
    },
}  # fmt: skip
#: Lines of other files, each with what follows it then.
CHANGED = {
    "mechanism": {
        "brl_jax/layers/__init__.py": {
            "from types import MappingProxyType": "from brl_jax.layers.recurrent.mean import MeanConfig",
            '        "full": FullConfig,': '        "mean": MeanConfig,',
        },
        "tests/oracles/recurrent.py": {
            "NETWORKS = {": '    "mean": residual_network(mean_mix),',
            "import numpy as np": """
def mean_mix(u, p, m, d):
    mean = np.cumsum(project(u, p["value"]), 0) / np.arange(1, len(u) + 1)[:, None, None]
    return np.tensordot(mean, p["out"]["kernel"], axes=2)
""",
        },
        "tests/laws/cases.py": {
            "VARIANTS: dict[str, dict[str, tuple[str | None, dict[str, Any]]]] = {": '    "mean": {"": _case()},',
        },
    },
    "backend": {
        "brl_jax/attention/local/attend.py": {
            "from brl_jax.attention.local import cudnn, gpu, tpu, xla": "from brl_jax.attention.local import plain",
            "    return {": (
                '        "cpu": [Backend("plain", of_call(plain.attend), of_call(plain.unsupported))],'
            ),
        },
        "brl_jax/attention/core/dispatch.py": {
            'Implementation = Literal["xla", "pallas", "pallas_interpret", "cudnn", "triton", "triton_interpret"]': (
                'Implementation = Literal[Implementation, "plain"]'
            ),
        },
    },
    "task": {
        "train/tasks/every.py": {
            "from train.tasks.mlm import MLM": "from train.tasks.parity import PARITY",
            "    MLM,": "    PARITY,",
        },
    },
}
#: Programs that use what is new.
PROGRAMS = {
    "mechanism": """
        import subprocess, sys
        from eval.tasks.generate import main as generate
        from train.lm import main as train

        train(
            "--workdir run --steps 2 --mechanism mean --batch 2 --length 16 --num_layers 1 --d_model 16 --num_heads 2 "
            "--d_ff 16 --eval_tokens 64 --sample_tokens 3 --data text:*.txt".split()
        )
        generate("--workdir run --prompt a --tokens 3".split())
        for tests in ("tests/laws/test_laws.py -k mean", "tests/test_speculation.py -m slow -k mean"):
            subprocess.run([sys.executable, *f"-m pytest -q -n 0 {tests}".split()], check=True)
    """,
    "backend": """
        import jax, jax.numpy as jnp, numpy as np
        from brl_jax import local_attention

        def loss(x, name):
            return jnp.sum(local_attention(*x, local_window_size=(5, 2), implementation=name) ** 2)

        x = jax.random.normal(jax.random.key(0), (3, 1, 40, 2, 8))
        expected, *others = (jax.grad(loss)(x, name) for name in ("xla", "plain", None))
        for got in others:
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        try:
            local_attention(*x, jnp.zeros(()), local_window_size=2, implementation="plain")
        except NotImplementedError as error:
            assert "plain takes no bias" in str(error)
        else:
            raise AssertionError("the bias is ignored")
    """,
    "task": """
        from eval.harness.runs import open_run
        from train.parity import main
        from train.tasks.every import TASKS

        main("--workdir run --steps 2".split())
        run = open_run(list(TASKS.values()), "run", "last")
        assert (run.task.name, run.step) == ("parity", 2)
    """,
}
PRINTED = {"mechanism": "passed", "backend": "the new backend", "task": ""}


def named(kind):
    """The files and folders that the guide names for an addition."""
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    start, end = (
        ("## Add a mechanism", "## Add something") if kind == "mechanism" else (f"- **A {kind}**", "\n- **")
    )
    return re.findall(r"`([\w/]+/[\w.]*)`", guide[guide.index(start) :].split(end)[0])


@pytest.mark.parametrize("kind", NEW)
def test_the_guide_names_every_file(kind):
    places = named(kind)
    for path in (*NEW[kind], *CHANGED[kind]):
        inside = [place for place in places if place.endswith("/") and path.startswith(place)]
        beside = [place for place in places if path in NEW[kind] and Path(place).parent == Path(path).parent]
        assert path in places or inside or beside, (path, places)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NEW)
def test_these_files_are_enough(kind, tmp_path):
    for folder in ("brl_jax", "pallas_kernels", "train", "eval", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, text in NEW[kind].items():
        (tmp_path / path).write_text(text)
    for path, lines in CHANGED[kind].items():
        text = (tmp_path / path).read_text()
        for line, more in lines.items():
            assert text.count(f"{line}\n") == 1, (path, line)
            text = text.replace(f"{line}\n", f"{line}\n{more}\n")
        (tmp_path / path).write_text(text)
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("".join(f"{split} {i}, " for i in range(400)))
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAMS[kind])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert PRINTED[kind] in ran.stdout
