"""A process with eight simulated devices computes what tests ask for, since a process cannot change its devices.

result = devices.ask("tests.train.meshes", "rows")

calls `PARTS["rows"]()` of that module there. Starting the process takes seconds, and so does compiling its programs, so
the fixture `devices` of tests/conftest.py lasts for the session and its tests share one xdist group. Tests that need
fewer devices use the first of the eight."""

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
    """The process, started by the first question. Repeated questions get the stored answer."""

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
            except subprocess.TimeoutExpired:  # it has answered; the suite does not wait for it to exit
                self._process.kill()
                self._process.communicate()
        self._log.close()


def main() -> None:
    """Answers one question per line; everything printed meanwhile goes to stderr."""
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
        jax.config.update("jax_compilation_cache_dir", folder)  # some single-device programs are needed twice
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
