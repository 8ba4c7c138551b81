"""A process of eight simulated devices, which computes what tests ask of it: a process keeps the devices it began with.

    result = devices.ask("tests.train.meshes", "rows")

calls `PARTS["rows"]()` of that module there. Starting one takes seconds and so do the programs that it compiles, so the
fixture `devices` of tests/conftest.py is one for the session, and its tests are of one group for xdist. Tests of fewer
devices use the first of the eight.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Devices:
    """The process, which starts with the first question; each is answered once."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)

    def ask(self, module: str, part: str) -> Any:
        if (module, part) not in self._answers:
            self._answers[module, part] = self._compute(module, part)
        return self._answers[module, part]

    def _compute(self, module: str, part: str) -> Any:
        if self._process is None:
            line = [sys.executable, "-m", "tests.support.devices"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(line, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=self._log)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{json.dumps([module, part])}\n".encode())
            self._process.stdin.flush()
            result, failure = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError):
            self._log.seek(0)
            raise AssertionError(self._log.read()[-4000:].decode()) from None
        assert failure is None, failure
        return result

    def close(self) -> None:
        if self._process is not None:
            try:
                self._process.communicate(timeout=60)
            except subprocess.TimeoutExpired:  # its answers are in; the suite does not wait for how it ends
                self._process.kill()
                self._process.communicate()
        self._log.close()


def main() -> None:
    """Answers one question a line; whatever is printed on the way goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    import gc

    import jax

    gc.set_threshold(100_000, 20, 10)  # as in tests/conftest.py
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)  # some programs of one device are needed twice
        for line in sys.stdin:
            module, part = json.loads(line)
            try:
                answer = importlib.import_module(module).PARTS[part](), None
            except Exception:
                answer = None, traceback.format_exc()
            pickle.dump(answer, answers)
            answers.flush()


if __name__ == "__main__":
    main()
