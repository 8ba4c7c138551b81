"""Nodes without a graph: newsgroup posts as word counts, images or features from a file, and a graph of nearest nodes.

The protocol follows NodeFormer (Wu et al. 2022, arXiv:2306.08385), which BRL-Attention (OpenReview Vpyg3fqXbl,
section A.1) follows: one type of nodes, half of them for training and a quarter each for validation and test.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from brl_jax.json_files import check_regular, parse_json
from train.data.files import numbered_lines, shown
from train.data.graphs.graph import RawGraph, Relation
from train.data.graphs.images import describe
from train.engine.errors import UNREADABLE, UserError, one_line


def post_files(folder: Path) -> list[Path]:
    """train.jsonl and test.jsonl (or .jsonl.gz) of a folder, those that exist."""
    names = [f"{split}.jsonl{ending}" for split in ("train", "test") for ending in ("", ".gz")]
    return [folder / name for name in names if (folder / name).is_file()]


def read_posts(folder: Path) -> RawGraph:
    """Posts from lines {"text": ..., "label": 0} of JSON. Their features are TF-IDF weights of the words that more than
    one post in twenty has, without English stop words.

    Raises:
      UserError: a line is wrong; the error names it.
    """
    from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer

    texts, labels = [], []
    for path in post_files(folder):
        for number, line in numbered_lines(path):
            try:
                row = parse_json(line, {"text": str, "label": int})
                text, label = row["text"], row["label"]
            except ValueError:
                label = -1
            if not 0 <= label < 2**31:
                raise UserError(
                    f'--data_dir: {path}, line {number}: expected JSON with "text" and a "label" from 0 on, '
                    f"got {shown(line)}"
                )
            texts.append(text)
            labels.append(label)
    try:
        counts = CountVectorizer(stop_words="english", min_df=0.05).fit_transform(texts)
    except ValueError as error:
        raise UserError(f"--data_dir: {folder}: {one_line(error)}") from error
    features = TfidfTransformer(smooth_idf=False).fit_transform(counts)
    return _lone_nodes(str(folder), features, np.array(labels))


def read_nodes(path: Path) -> RawGraph:
    """Nodes of an .npz file with "features" (N, F) and "labels" (N,) integers from 0 on, or with images and their
    labels as "x_train", "y_train", "x_test" and "y_test" (see `train.data.graphs.images.describe`).

    Raises:
      UserError: the file cannot be read, or has other arrays.
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
    if not features.size or not np.isfinite(features).all():
        raise UserError(f"--data_dir: {path}: expected finite features, at least one a node")
    return _lone_nodes(str(path), sp.csr_matrix(features.astype(np.float32)), labels)


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
