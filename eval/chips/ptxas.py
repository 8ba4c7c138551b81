"""Where the assembler of GPU kernels is."""

import shutil
import sys
from pathlib import Path


def _in_packages(pattern: str) -> Path | None:
    return next((path for folder in map(Path, sys.path) for path in folder.glob(pattern)), None)


def wheel_assemblers() -> Path | None:
    """The folder with ptxas of the CUDA wheels of this Python."""
    found = _in_packages("nvidia/*/bin/ptxas")
    return None if found is None else found.parent


def find_assembler() -> str | None:
    """ptxas of the CUDA wheels of this Python, else Triton's for the newest GPUs, else the one on PATH.

    An older one refuses a newer Triton's code.
    """
    folder = wheel_assemblers()
    found = folder / "ptxas" if folder else _in_packages("triton/backends/nvidia/bin/ptxas-blackwell")
    return str(found) if found else shutil.which("ptxas")
