"""Images as nodes without a graph: 128 numbers for each, which say where edges lie and in which direction."""

from __future__ import annotations

import numpy as np

CELLS, DIRECTIONS = 4, 8
_IMAGES = 1024


def describe(images: np.ndarray) -> np.ndarray:
    """Histograms of gradients (Dalal & Triggs, CVPR 2005) of images (N, H, W) or (N, H, W, 3), as (N, 128) float32.

    An image is divided into 4 x 4 cells. In each, the lengths of the brightness's gradients are summed by their
    direction, of eight between 0 and 180 degrees, a gradient between two directions in proportion. The numbers of an
    image are scaled to the mean 1, so that contrast does not count, and their square roots taken.

    Raises:
      ValueError: images of another shape, or of fewer than 4 x 4 pixels.
    """
    if (
        images.ndim not in (3, 4)
        or images.shape[3:] not in ((), (1,), (3,))
        or min(images.shape[1:3]) < CELLS
    ):
        raise ValueError(f"expected images (N, H, W) or (N, H, W, 3) of at least 4 x 4, got {images.shape}")
    parts = [_describe(images[start : start + _IMAGES]) for start in range(0, len(images), _IMAGES)]
    return np.concatenate([np.zeros((0, CELLS * CELLS * DIRECTIONS), np.float32), *parts])


def _describe(images: np.ndarray) -> np.ndarray:
    grey = images.astype(np.float32)
    if grey.ndim == 4:
        grey = grey.mean(axis=-1)
    down, right = np.gradient(grey, axis=(1, 2))
    turn = np.arctan2(down, right) / np.pi * DIRECTIONS  # in steps from one direction to the next
    apart = np.abs((turn[..., None] - np.arange(DIRECTIONS) + DIRECTIONS / 2) % DIRECTIONS - DIRECTIONS / 2)
    sums = np.hypot(down, right)[..., None] * np.maximum(1.0 - apart, 0.0)
    for axis in (1, 2):
        starts = np.arange(CELLS) * grey.shape[axis] // CELLS
        sums = np.add.reduceat(sums, starts, axis=axis)
    numbers = sums.reshape(len(images), -1)
    mean = numbers.mean(axis=1, keepdims=True)
    return np.sqrt(numbers / np.where(mean > 0, mean, 1.0)).astype(np.float32)
