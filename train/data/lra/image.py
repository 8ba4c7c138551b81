"""CIFAR-10 in grey, pixel by pixel: from TensorFlow Datasets, or an .npz file with x_train, y_train, x_test, y_test."""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from train.data.examples import Source, digest, tfds_source
from train.data.files import SPLIT_OF, file_stats, rows_of
from train.engine.errors import UNREADABLE, UserError, one_line

NUM_CLASSES = 10
RESOLUTION = 32
# ITU-R 601: what TensorFlow's rgb_to_grayscale, which the Long Range Arena uses, weighs the colours with. It counts
# them from 0 to 1 and goes back to whole numbers by a factor of 255.5, so that white, 0.9999, is 255.
_LUMA = np.array([0.2989, 0.5870, 0.1140]) * 255.5 / 255


def _grey(image: np.ndarray, where: str) -> bytes:
    """The pixels of a grey or coloured image."""
    if image.ndim == 3 and image.shape[-1] == 1:
        image = image[..., 0]
    if image.dtype != np.uint8 or image.shape not in ((RESOLUTION,) * 2, (RESOLUTION, RESOLUTION, 3)):
        raise UserError(
            f"--data_dir: {where}: expected uint8 images of {RESOLUTION} x {RESOLUTION} (x 3), "
            f"got {image.dtype} {image.shape}"
        )
    return (image if image.ndim == 2 else (image @ _LUMA).astype(np.uint8)).tobytes()


def open_tfds_source() -> Source:
    """CIFAR-10 of TensorFlow Datasets."""
    read = lambda row: _grey(np.asarray(row["image"]), "tfds:cifar10")  # noqa: E731
    return tfds_source("cifar10", read, _LUMA.tolist())


def open_files(folder: Path) -> Source | None:
    """The only .npz file of a folder, or the file itself; every tenth training image is for validation.

    None if there is no such file. Raises UserError, also while reading, if it is not as expected.
    """
    paths = [folder] if folder.suffix == ".npz" else sorted(folder.glob("*.npz"))
    if not paths:
        return None
    if len(paths) > 1:
        raise UserError(
            f"--data_dir: expected one .npz file in {folder}, got {', '.join(p.name for p in paths)}"
        )
    path = paths[0]
    splits = {split: functools.partial(_read, path, split) for split in SPLIT_OF}
    return Source(f"images of {path}", digest("npz", file_stats([path])), splits)


def _read(path: Path, split: str) -> Iterator[tuple[bytes, int]]:
    images, labels = (_array(path, f"{name}_{SPLIT_OF[split]}") for name in "xy")
    if len(images) != len(labels):
        raise UserError(
            f"--data_dir: {path}: {len(images)} images and {len(labels)} labels; expected the same number"
        )
    if labels.dtype.kind not in "iu" or labels.size != len(labels):
        raise UserError(
            f"--data_dir: {path}: expected a whole number as the label of each image, got an array of "
            f"{labels.dtype} and shape {labels.shape}"
        )
    for i in rows_of(len(images), split):
        yield _grey(images[i], str(path)), int(labels[i].item())


def _array(path: Path, name: str) -> np.ndarray:
    try:
        with open(path, "rb") as file, np.load(file) as arrays:
            if name not in arrays:
                raise UserError(f"--data_dir: {path} has no {name}, only {', '.join(arrays)}")
            return arrays[name]
    # TypeError: an .npy file under this name has one array and no names.
    except (*UNREADABLE, TypeError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--data_dir: cannot read {path} (truncated?): {one_line(error)}") from error
