"""Where the assembler of GPU kernels is."""

import shutil
import sys
from pathlib import Path


def find_assembler() -> str | None:
    """ptxas of the CUDA wheels of this Python, else Triton's for the newest GPUs, else the one on PATH.

    An older one refuses a newer Triton's code.
    """
    for pattern in ("nvidia/*/bin/ptxas", "triton/backends/nvidia/bin/ptxas-blackwell"):
        for path in (found for folder in map(Path, sys.path) for found in folder.glob(pattern)):
            return str(path)
    return shutil.which("ptxas")
