"""The sizes that the kernels of recurrences are compiled with, and what they cannot run."""

from __future__ import annotations

from typing import Any, NamedTuple

from pallas_kernels.triton.core import bridge
from pallas_kernels.triton.core.sizes import adjustable, padded

#: Features of queries and keys that one program holds.
MOST_FEATURES = 256
#: Features of the values, which are cut into tiles.
MOST_VALUES = 512


class Launch(NamedTuple):
    """Features of the values in a program, and Triton's warps and stages."""

    values: int
    num_warps: int
    num_stages: int


class SumSizes(NamedTuple):
    """Sizes of the sums of outer products.

    Attributes:
      chunk: tokens between two states that are kept. block: keys that a kernel reads at once.
      rows: queries of a program. `block` divides rows, and rows divides chunk.
      scan, scan_stages: numbers of a state in a program of the scan, and the chunks that it loads ahead.
    """

    chunk: int
    block: int
    rows: int
    scan: int
    scan_stages: int
    sums: Launch
    outputs: Launch
    query_gradient: Launch
    key_gradient: Launch


class FeatureSizes(NamedTuple):
    """Sizes of the sums of outer products with a decay by feature.

    Attributes:
      chunk, scan, scan_stages: as for `SumSizes`; a chunk has one block or two. block: tokens of a program.
      features, gradient_features: features of queries and keys that a program of the outputs (and of the values'
        gradient) holds at once, and one of the other gradients.
      segmented_features: the latter where rows have segments, which take registers too.
    """

    chunk: int
    block: int
    features: int
    gradient_features: int
    segmented_features: int
    scan: int
    scan_stages: int
    sums: Launch
    outputs: Launch
    value_gradient: Launch
    gradients: Launch


class DeltaSizes(NamedTuple):
    """Sizes of the delta rule.

    Attributes:
      chunk: tokens between two states, and of a triangular inverse.
      spans: the most parts of a row that are walked at the same time. least_span: the fewest chunks of one.
      features, gradient_features: features of queries and keys that a program of a chunk's products holds at once, and
        one of their gradients.
    """

    chunk: int
    spans: int
    least_span: int
    features: int
    gradient_features: int
    chunks: Launch
    maps: Launch
    states: Launch
    gradient_maps: Launch
    state_gradient: Launch
    pair_gradient: Launch
    gradient: Launch


# By the least compute capability and the most padded features of a query that they are for. Chosen so that no kernel
# spills registers (`python -m eval.gpu_costs`; docs/gpu.md names those that do), and for 90 by times on an H200 too.
_SUMS = {
    (90, 128): SumSizes(
        256, 64, 64, 512, 4, Launch(128, 8, 2), Launch(128, 4, 2), Launch(128, 4, 2), Launch(128, 8, 2)
    ),
    (90, 256): SumSizes(
        256, 64, 64, 512, 4, Launch(64, 8, 2), Launch(128, 8, 2), Launch(128, 8, 1), Launch(128, 8, 1)
    ),
    (80, 128): SumSizes(
        256, 32, 32, 512, 4, Launch(64, 8, 2), Launch(64, 4, 2), Launch(128, 8, 1), Launch(128, 8, 1)
    ),
    (80, 256): SumSizes(
        256, 32, 32, 512, 4, Launch(64, 8, 2), Launch(64, 8, 1), Launch(128, 8, 1), Launch(64, 8, 1)
    ),
}
_SUMS |= {
    (100, 128): _SUMS[90, 128]._replace(key_gradient=Launch(128, 8, 1)),
    (100, 256): _SUMS[90, 256],
}
_DELTAS = {
    (90, 128): DeltaSizes(
        64, 8, 8, 64, 64, Launch(0, 4, 1), Launch(64, 4, 3), Launch(32, 4, 3), Launch(64, 8, 3), Launch(64, 8, 3),
        Launch(128, 4, 1), Launch(64, 4, 1),
    ),
    (90, 256): DeltaSizes(
        64, 16, 8, 64, 64, Launch(0, 8, 1), *4 * [Launch(32, 8, 1)], *2 * [Launch(64, 8, 1)],
    ),
    (80, 128): DeltaSizes(64, 16, 8, 64, 16, Launch(0, 8, 1), *6 * [Launch(32, 8, 1)]),
    (80, 256): DeltaSizes(32, 16, 8, 32, 32, Launch(0, 8, 1), *6 * [Launch(32, 8, 1)]),
}  # fmt: skip
_DELTAS |= {
    (100, 128): _DELTAS[90, 128]._replace(states=Launch(32, 8, 3), pair_gradient=Launch(64, 4, 1)),
    (100, 256): _DELTAS[90, 256],
}
_BY_FEATURE = {
    (100, 128): FeatureSizes(
        128, 64, 64, 32, 32, 512, 4, Launch(128, 8, 2), Launch(64, 4, 1), Launch(64, 4, 1), Launch(64, 8, 1),
    ),
    (90, 128): FeatureSizes(
        128, 64, 128, 64, 32, 512, 4, Launch(128, 8, 2), Launch(128, 4, 1), Launch(128, 4, 1), Launch(64, 4, 1),
    ),
    (80, 128): FeatureSizes(128, 64, 32, 32, 32, 512, 4, *4 * [Launch(64, 8, 1)]),
}  # fmt: skip
_BY_FEATURE |= {(c, 256): sizes._replace(sums=Launch(32, 8, 1)) for (c, _), sizes in _BY_FEATURE.items()}
_DELTAS_BY_FEATURE = {
    (90, 128): DeltaSizes(
        64, 8, 8, 64, 32, Launch(0, 4, 3), Launch(128, 8, 3), Launch(32, 4, 3), Launch(64, 4, 3), Launch(64, 8, 3),
        Launch(64, 4, 1), Launch(64, 4, 3),
    ),
    (90, 256): DeltaSizes(
        64, 16, 8, 64, 16, Launch(0, 4, 1), *4 * [Launch(32, 8, 1)], *2 * [Launch(64, 8, 1)],
    ),
    (80, 128): DeltaSizes(
        64, 16, 8, 32, 16, Launch(0, 8, 1), *6 * [Launch(32, 8, 1)],
    )._replace(gradient=Launch(64, 4, 1)),
    (80, 256): DeltaSizes(32, 16, 8, 16, 16, Launch(0, 8, 1), *6 * [Launch(32, 8, 1)]),
}  # fmt: skip
_DELTAS_BY_FEATURE |= {
    (100, 128): _DELTAS_BY_FEATURE[90, 128]._replace(states=Launch(64, 8, 2), gradient=Launch(64, 4, 1)),
    (100, 256): _DELTAS_BY_FEATURE[90, 256],
}
# float32 takes twice the registers and shared memory of a 16-bit type.
_FLOAT32 = (
    SumSizes(64, 32, 32, 512, 4, *4 * [Launch(32, 8, 1)]),
    FeatureSizes(64, 32, 32, 32, 32, 512, 4, *4 * [Launch(32, 8, 1)]),
    DeltaSizes(32, 16, 8, 32, 32, Launch(0, 8, 1), *4 * [Launch(16, 8, 1)], *2 * [Launch(32, 8, 1)]),
    DeltaSizes(32, 1, 8, 32, 16, Launch(0, 8, 1), *4 * [Launch(16, 8, 1)], *2 * [Launch(32, 8, 1)]),
)
# Small tiles keep Triton's interpreter quick and show every kind of edge.
_INTERPRETED = (
    SumSizes(64, 16, 32, 128, 1, *4 * [Launch(16, 4, 1)]),
    FeatureSizes(64, 32, 16, 32, 16, 128, 1, *4 * [Launch(16, 4, 1)]),
    DeltaSizes(32, 3, 2, 16, 16, *7 * [Launch(16, 4, 1)]),
    DeltaSizes(32, 3, 2, 16, 16, *7 * [Launch(16, 4, 1)]),
)


@adjustable("sum")
def sum_sizes(features: int, dtype: Any) -> SumSizes:
    """The sizes for queries with this many features and this type, on the GPU that is compiled for."""
    return bridge.tuned(_SUMS, dtype, max(128, padded(features)), _FLOAT32[0], _INTERPRETED[0])


@adjustable("sum_by_feature")
def feature_sizes(features: int, dtype: Any) -> FeatureSizes:
    """The same for sums with a decay by feature."""
    return bridge.tuned(_BY_FEATURE, dtype, max(128, padded(features)), _FLOAT32[1], _INTERPRETED[1])


@adjustable("delta")
def delta_sizes(features: int, dtype: Any) -> DeltaSizes:
    """The same for the delta rule."""
    return bridge.tuned(_DELTAS, dtype, max(128, padded(features)), _FLOAT32[2], _INTERPRETED[2])


@adjustable("delta_by_feature")
def feature_delta_sizes(features: int, dtype: Any) -> DeltaSizes:
    """The same for the delta rule with a decay by feature."""
    return bridge.tuned(_DELTAS_BY_FEATURE, dtype, max(128, padded(features)), _FLOAT32[3], _INTERPRETED[3])


def recurrence_unsupported(query: Any, key: Any, value: Any) -> str | None:
    """Why the kernels cannot run on arrays of these shapes and dtypes; None if they can."""
    if (reason := bridge.dtype_unsupported(query)) is not None:
        return reason
    if query.shape[3] > MOST_FEATURES:
        return f"queries must have at most {MOST_FEATURES} features, got {query.shape[3]}"
    if value.shape[3] > MOST_VALUES:
        return f"values must have at most {MOST_VALUES} features, got {value.shape[3]}"
    return None
