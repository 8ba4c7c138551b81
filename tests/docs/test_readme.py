"""README's commands run as printed, for a few steps, in an environment with only what README installs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
#: Makes training end in seconds; nothing else about the commands changes.
SHORT = ["--steps", "4", "--eval_every", "4", "--eval_tokens", "512", "--full_eval", "False"]


def commands():
    """The lines of README's shell blocks, without comments and without creating the environment."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    shell = [block for language, block in blocks if not language]
    lines = [shlex.split(line, comments=True) for block in shell for line in block.splitlines()]
    return [" ".join(map(shlex.quote, line)) for line in lines]


def test_commands_are_found():
    found = commands()
    assert "pip install -e '.[train]'" in found
    assert sum("python -m train.lm" in command for command in found) == 2
    own = next(command for command in found if "python -m train.lm --data" in command)
    assert found.index(own) < min(i for i, command in enumerate(found) if "python -m eval" in command)


@pytest.mark.slow
def test_commands_run_after_the_install_line(tmp_path):
    checkout = tmp_path / "checkout"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        if name.split("/")[0] not in ("tests", "notebooks"):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    (checkout / "books").mkdir()
    (checkout / "books" / "one.txt").write_text("It was a bright cold day in April. " * 2000)
    subprocess.run([sys.executable, "-m", "venv", checkout / ".venv"], check=True)
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAX", "XLA"))
    }
    environment = inherited | {"PATH": f"{checkout / '.venv' / 'bin'}:{os.environ['PATH']}"}

    def run(command):
        done = subprocess.run(
            command, shell=True, cwd=checkout, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    run("pip install -q -e '.[train]'")
    for command in commands():
        _, found, module = command.partition("python -m ")
        if found and not module.startswith("pytest"):
            more = SHORT if module.startswith("train.") else []
            assert run(f"python -m {module} {shlex.join(more)}").strip(), command
