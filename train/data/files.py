"""Writing files so that each is whole or does not exist."""

from __future__ import annotations

import io
import uuid

import numpy as np
from etils import epath


def beside(path: epath.Path) -> epath.Path:
    """A name in the folder of `path` that no other process uses, to write to before renaming."""
    return path.parent / f".{path.name}.{uuid.uuid4().hex}"


def write_whole(path: epath.Path, text: str) -> None:
    """Writes `path` in UTF-8, under another name that is then renamed; the folder must exist."""
    aside = beside(path)
    try:
        aside.write_bytes(text.encode())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Header of a .npy file; its length is the same whatever shape[0]."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    return file.getvalue()
