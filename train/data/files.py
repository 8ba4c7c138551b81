"""Writing .npy files a piece at a time."""

from __future__ import annotations

import io

import numpy as np


def npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Header of a .npy file; its length is the same whatever shape[0]."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    return file.getvalue()
