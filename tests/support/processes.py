"""Programs in Python processes of their own, on the CPU, in the repository's root."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def _options(environment: dict[str, str]) -> dict[str, Any]:
    return {"cwd": ROOT, "env": os.environ | {"JAX_PLATFORMS": "cpu"} | environment, "text": True}


def python(*words: str, given: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The finished process of `python words`, with its output; `given` is its standard input."""
    line = [sys.executable, *words]
    return subprocess.run(line, input=given, capture_output=True, check=False, **_options(environment))


def started(*words: str, **environment: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *words], stdin=pipe, stdout=pipe, stderr=pipe, **_options(environment)
    )
