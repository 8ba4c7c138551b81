"""Nodes without a graph: newsgroup posts as word counts, images as numbers that say where edges lie and in which
direction, or features from a file, and a graph of nearest nodes.

The protocol follows NodeFormer (Wu et al. 2022, arXiv:2306.08385), which BRL-Attention (OpenReview Vpyg3fqXbl,
section A.1) follows: one type of nodes, half of them for training and a quarter each for validation and test.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from brl_jax.json_files import check_regular
from train.data.files import find_file, labelled_text, numbered_lines, parsed
from train.data.graphs.graph import RawGraph, Relation
from train.engine.errors import UNREADABLE, UserError, one_line

# Of an image: cells a side, and directions of edges in each.
CELLS, DIRECTIONS = 4, 8
_IMAGES = 1024  # described at once


def post_files(folder: Path) -> list[Path]:
    """train.jsonl and test.jsonl of a folder, those that exist, each also as .gz."""
    found = (find_file(folder / f"{split}.jsonl") for split in ("train", "test"))
    return [path for path in found if path is not None]


def read_posts(folder: Path) -> RawGraph:
    """Posts from lines {"text": ..., "label": 0} of JSON. Their features are TF-IDF weights of the words that more than
    one post in twenty has, without English stop words.
    """
    from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer

    rows = [row for path in post_files(folder) for row in parsed(path, numbered_lines(path), labelled_text)]
    try:
        counts = CountVectorizer(stop_words="english", min_df=0.05).fit_transform([text for text, _ in rows])
    except ValueError as error:
        raise UserError(f"--data_dir: {folder}: {one_line(error)}") from error
    features = TfidfTransformer(smooth_idf=False).fit_transform(counts)
    return _lone_nodes(str(folder), features, np.array([label for _, label in rows]))


def read_nodes(path: Path) -> RawGraph:
    """Nodes of an .npz file with "features" (N, F) and "labels" (N,) integers from 0 on, or with images and their
    labels as "x_train", "y_train", "x_test" and "y_test" (see `describe`).
    """
    try:
        check_regular(path)
        with np.load(path) as file:
            if "features" not in file and "x_train" in file:
                images, labels = (
                    np.concatenate([file[f"{name}_{s}"] for s in ("train", "test")]) for name in "xy"
                )
                features = describe(images)
            else:
                features, labels = np.asarray(file["features"]), np.asarray(file["labels"])
    # TypeError: an .npy file under this name has one array and no names.
    except (*UNREADABLE, TypeError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(
            f'--data_dir: {path}: expected an .npz file with "features" and "labels", or with images as "x_train", '
            f'"y_train", "x_test" and "y_test"'
        ) from error
    is_numbers = features.dtype.kind in "biuf" and labels.dtype.kind in "iu"
    if features.ndim != 2 or labels.shape != features.shape[:1] or not is_numbers:
        raise UserError(
            f"--data_dir: {path}: expected features (N, F), real numbers, and N whole numbers as labels, got "
            f"{features.dtype} {features.shape} and {labels.dtype} {labels.shape}"
        )
    with np.errstate(over="ignore"):
        features = features.astype(np.float32)
    if not features.size or not np.isfinite(features).all():
        raise UserError(f"--data_dir: {path}: expected features within float32, at least one a node")
    return _lone_nodes(str(path), sp.csr_matrix(features), labels)


def describe(images: np.ndarray) -> np.ndarray:
    """Histograms of gradients (Dalal & Triggs, CVPR 2005) of images (N, H, W) or (N, H, W, 3), as (N, 128) float32.

    An image is divided into 4 x 4 cells. In each, the lengths of the brightness's gradients are summed by their
    direction, of eight between 0 and 180 degrees, a gradient between two directions in proportion. The numbers of an
    image are scaled to the mean 1, so that contrast does not count, and their square roots taken.
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


def _lone_nodes(name: str, features: Any, labels: np.ndarray) -> RawGraph:
    count = features.shape[0]
    if labels.min() < 0 or labels.max() >= count:
        raise UserError(f"--data_dir: {name}: expected labels from 0 to fewer than the {count} nodes")
    return RawGraph(
        name=name,
        types=("node",),
        counts=(count,),
        features=(sp.csr_matrix(features, dtype=np.float32),),
        relations=(),
        target=0,
        nodes=np.arange(count),
        labels=labels.astype(np.int32),
        is_test=None,
        num_classes=max(int(labels.max()) + 1, 2),
    )


def nearest(raw: RawGraph, neighbours: int) -> Relation:
    """Links from each node to its nearest ones by the cosine of their features, in both directions."""
    from sklearn.neighbors import kneighbors_graph

    found = kneighbors_graph(raw.features[0], neighbours, metric="cosine", include_self=False)
    adjacency = sp.csr_matrix(((found + found.T) > 0).astype(np.float32))
    adjacency.sort_indices()
    return Relation("nearest", 0, 0, adjacency)
