"""A classifier's head that starts as a linear map, fitted to what it reads from its encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.special import log_softmax

from brl_jax.models import Classifier, PairClassifier
from train.engine.batch import Batch

_RIDGE = 1e-3
# Factors on the scores of a regression; a head takes the one with the lowest loss.
_FACTORS = 2.0 ** np.arange(-2, 7)


class LinearMap(NamedTuple):
    """Scores `features @ kernel + bias`, one for each class.

    Attributes:
      kernel: (features, classes) float64.
      bias: (classes,) float64.
    """

    kernel: Float[np.ndarray, "D C"]
    bias: Float[np.ndarray, " C"]

    def __call__(self, features: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "N C"]:
        """The scores of features."""
        return features @ self.kernel + self.bias


def fitted(features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, " N"], num_classes: int) -> LinearMap:
    """Ridge regression on standardised features, with a constant, to the classes' indicators; float64."""
    mean, deviation = features.mean(0), features.std(0) + 1e-12
    rows = np.c_[(features - mean) / deviation, np.ones(len(features))]
    penalty = _RIDGE * len(rows) * np.eye(rows.shape[1])
    penalty[-1, -1] = 0.0
    solved = np.linalg.solve(rows.T @ rows + penalty, rows.T @ np.eye(num_classes)[labels])
    kernel = solved[:-1] / deviation[:, None]
    return LinearMap(kernel, solved[-1] - mean @ kernel)


def read_features(
    encode: Callable[[Any, Any], Array], batches: Iterable[Batch]
) -> tuple[Float[np.ndarray, "N D"], Int[np.ndarray, " N"]]:
    """The features of all examples, and their labels.

    Args:
      encode: the tokens and the lengths of a batch, int32 -> features (B, D).
      batches: {"tokens": (B, [2,] T), "lengths": (B, [2]), "targets": (B,), "weights": (B,)}. Examples of weight 0 do
        not count.
    """
    features, labels = [], []
    for batch in batches:
        exists = batch["weights"] > 0
        features.append(np.asarray(encode(batch["tokens"], batch["lengths"]), np.float64)[exists])
        labels.append(batch["targets"][exists])
    return np.concatenate(features), np.concatenate(labels)


def fitted_head(
    model: Classifier | PairClassifier, params: Any, batches: Iterable[Batch]
) -> Mapping[str, Any]:
    """The parameters of a classifier's head (NumPy arrays) that give the scores of the linear map fitted to what it
    reads, times the power of two with the lowest loss on the same examples.

    The hidden layer has a unit for each score and one for its negative; its other units stay as they are, and the
    output does not read them yet.

    Raises:
      ValueError: the hidden layer has fewer than two units for each class.
    """
    head = jax.tree.map(np.array, params["head"])
    width, num_classes = head["out"]["kernel"].shape
    if width < 2 * num_classes:
        raise ValueError(f"d_ff must be at least 2 x num_classes = {2 * num_classes}, got {width}")

    @jax.jit
    def encode(tokens: Any, lengths: Any) -> Any:
        return model.apply({"params": params}, tokens, lengths=lengths, method="features")

    features, labels = read_features(encode, batches)
    linear = fitted(features, labels, num_classes)
    scores = linear(features)
    places = np.arange(len(labels)), labels
    # The one of the lowest cross-entropy.
    factor = max(_FACTORS, key=lambda factor: log_softmax(factor * scores, axis=-1)[places].sum())
    units = slice(0, 2 * num_classes)
    signs = np.kron(np.eye(num_classes), [[1.0, -1.0]])  # (classes, units)
    head["hidden"]["kernel"][:, units] = factor * linear.kernel @ signs
    head["hidden"]["bias"][units] = factor * linear.bias @ signs
    head["out"]["kernel"][:] = 0.0
    head["out"]["kernel"][units] = signs.T
    head["out"]["bias"][:] = 0.0
    return head
