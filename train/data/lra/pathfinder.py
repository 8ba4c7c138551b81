"""Pathfinder: are the two dots of an image ends of the same dashed path? Generated, and read from the release.

Linsley et al. 2018 (arXiv:1805.08315), Kim et al. 2020, as in the Long Range Arena (Tay et al. 2020,
arXiv:2011.04006, section 3.2.5). Each image has two long paths of dashes and some short ones; the dots are the ends
of one long path, or ends of both. Sizes follow the release at each of its resolutions: the arena's hard set has 14
dashes in the long paths, the easier ones 9 and 6, and the short paths have a third of that.

Paths keep `clearance` from each other, and from themselves, which is more than the gap between dashes: a path can be
followed in the drawn image. Among the ends of both paths, those dots are taken whose distance is nearest to that
of the first path's ends, so that distance gives little away (docs/lra.md has the numbers).
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8
from PIL import Image, ImageDraw

from train.data.examples import Source, digest
from train.data.files import file_stats, numbered_lines, parsed, shown, writing_folder
from train.data.lra.workers import in_processes
from train.data.splits import SPLITS
from train.engine.errors import UserError, one_line

NUM_CLASSES = 2
# The release's folders of images, by the number of dashes of the long paths.
LEVELS: Mapping[int, str] = MappingProxyType(
    {6: "curv_baseline", 9: "curv_contour_length_9", 14: "curv_contour_length_14"}
)
HARD: Final = 14
# Turns from dash to dash, in radians: gentle ones are tried first, then any up to the sharpest.
_TURN, _SHARPEST = 0.35, 1.0
_DIRECTIONS = 8
_STARTS = 60
_SUPERSAMPLING = 4
# Pixels darker than this do not belong to a path.
_LIT = 20
# Images of a chunk. The examples of a seed depend on it.
_CHUNK = 250
_DOT, _DASH = 255, 190


class Size(NamedTuple):
    """Lengths in pixels: of a dash, the gap after it, its thickness, a dot's radius, the clearance between the middle
    lines of paths; and the number of short paths."""

    dash: float
    gap: float
    thickness: float
    dot: float
    clearance: float
    short_paths: int


SIZES: Mapping[int, Size] = MappingProxyType(
    {
        32: Size(dash=2.0, gap=0.6, thickness=0.75, dot=1.5, clearance=2.8, short_paths=5),
        64: Size(dash=5.0, gap=1.2, thickness=1.0, dot=2.5, clearance=4.5, short_paths=5),
        128: Size(dash=5.0, gap=2.0, thickness=1.5, dot=3.0, clearance=7.0, short_paths=8),
    }
)


class Scene(NamedTuple):
    """What an image shows: the corners (n + 1, 2) of each path as (x, y) in pixels, one dash a step, the long paths
    first; the dots (2, 2); and whether they are ends of one path."""

    paths: list[Float[np.ndarray, "n 2"]]
    dots: Float[np.ndarray, "2 2"]
    connected: bool


def _short(dashes: int) -> int:
    """Dashes of the short paths, for long ones of `dashes`."""
    return dashes // 3


def draw_scene(rng: np.random.Generator, resolution: int, connected: bool, dashes: int = HARD) -> Scene:
    """A scene at `resolution` pixels (32, 64 or 128) whose long paths have `dashes` dashes (6, 9 or 14)."""
    size = SIZES[resolution]
    while True:
        taken = _Taken(np.zeros((0, 2)), np.zeros(0))
        paths = []
        for i in range(2 + size.short_paths):
            found = _draw_path(rng, resolution, size, dashes if i < 2 else _short(dashes), taken, i < 2)
            if found is None:
                break
            path, occupied = found
            paths.append(path)
            taken = _Taken(*map(np.concatenate, zip(taken, occupied)))
        else:
            return Scene(paths, _dots(paths[0], paths[1], connected), connected)


def _dots(first: np.ndarray, second: np.ndarray, connected: bool) -> Float[np.ndarray, "2 2"]:
    if connected:
        return first[[0, -1]]
    wanted = np.linalg.norm(first[0] - first[-1])
    pairs = [np.stack([first[i], second[j]]) for i in (0, -1) for j in (0, -1)]
    return min(pairs, key=lambda pair: abs(np.linalg.norm(pair[0] - pair[1]) - wanted))


class _Taken(NamedTuple):
    """Points that paths keep clear of, and by how much: the squared distance."""

    points: Float[np.ndarray, "n 2"]
    squared_distances: Float[np.ndarray, " n"]


def _draw_path(
    rng: np.random.Generator, resolution: int, size: Size, dashes: int, taken: _Taken, is_long: bool
) -> tuple[Float[np.ndarray, "c 2"], _Taken] | None:
    """Corners of a path that keeps clear of occupied points, and the points it occupies; None if it does not fit.

    Long paths keep room for a dot at both ends.
    """
    room = size.dot if is_long else 0.0
    step, border = size.dash + size.gap, 1.0
    along = np.linspace(0, size.dash, max(2, math.ceil(size.dash) + 1))[:, None]
    at_ends = _Taken(taken.points, (np.sqrt(taken.squared_distances) + room) ** 2)
    # The occupied points, and then the path's own points, dash after dash.
    before, own = len(taken.points), dashes * len(along)
    obstacles = _Taken(
        np.concatenate([taken.points, np.empty((own, 2))]),
        np.concatenate([taken.squared_distances, np.full(own, size.clearance**2)]),
    )
    ahead = np.empty((2 * _DIRECTIONS, 1, 2))
    starts = rng.uniform(border + room, resolution - border - room, (_STARTS, 2))
    for start in starts[_clear(starts[:, None], at_ends)]:
        # Each dash's directions, as turns from the dash before: gentle ones are tried first.
        turns = rng.normal(0, _TURN, (dashes, 2 * _DIRECTIONS)).clip(-_SHARPEST, _SHARPEST)
        turns[:, _DIRECTIONS:] = rng.uniform(-_SHARPEST, _SHARPEST, (dashes, _DIRECTIONS))
        heading, corner = rng.uniform(0, 2 * math.pi), start
        corners = np.empty((dashes + 1, 2))
        corners[0] = start
        for i in range(dashes):
            headings = heading + turns[i]
            ahead[:, 0, 0], ahead[:, 0, 1] = np.cos(headings), np.sin(headings)
            points = corner + ahead * along
            last = i == dashes - 1
            edge = border + (room if last else 0.0)
            free = np.abs(points - resolution / 2).max((1, 2)) <= resolution / 2 - edge
            # The last two dashes are always near.
            end = before + max(i - 2, 0) * len(along)
            free &= _clear(points, _Taken(*(array[:end] for array in obstacles)))
            if last:
                free &= _clear(points[:, -1:], at_ends)
            chosen = free.argmax()
            if not free[chosen]:
                break
            heading = headings[chosen]
            obstacles.points[before + i * len(along) :][: len(along)] = points[chosen]
            corner = corners[i + 1] = corner + ahead[chosen, 0] * (size.dash if last else step)
        else:
            occupied = _Taken(*(array[before:] for array in obstacles))
            occupied.squared_distances[[0, -1]] = (size.clearance + room) ** 2
            return corners, occupied
    return None


def _clear(points: Float[np.ndarray, "d p 2"], taken: _Taken) -> np.ndarray:
    """Which of d groups of points keep their distance from all occupied points."""
    x = points[..., 0, None] - taken.points[:, 0]
    y = points[..., 1, None] - taken.points[:, 1]
    return (x * x + y * y >= taken.squared_distances).all((1, 2))


def render(scene: Scene, resolution: int) -> UInt8[np.ndarray, "R R"]:
    """The image: dashes in grey, dots in white, on black."""
    size, scale = SIZES[resolution], _SUPERSAMPLING
    image = Image.new("L", (resolution * scale, resolution * scale))
    draw = ImageDraw.Draw(image)
    share = size.dash / (size.dash + size.gap)
    for path in scene.paths:
        for i, (start, stop) in enumerate(itertools.pairwise(path)):
            # A step is a dash and the gap after it; the last has no gap.
            end = stop if i == len(path) - 2 else start + share * (stop - start)
            line = [tuple(start * scale), tuple(end * scale)]
            draw.line(line, fill=_DASH, width=max(1, round(size.thickness * scale)))
    for x, y in scene.dots:
        box = [(x - size.dot) * scale, (y - size.dot) * scale, (x + size.dot) * scale, (y + size.dot) * scale]
        draw.ellipse(box, fill=_DOT)
    return np.asarray(image.reduce(scale))


def mark(scene: Scene, image: UInt8[np.ndarray, "R R"]) -> UInt8[np.ndarray, "R R"]:
    """For each pixel of a scene's image: 2 on a path with a dot and on the dots, 1 on the other paths, 0 where it is
    dark."""
    dotted = scene._replace(paths=scene.paths[: 1 if scene.connected else 2])
    return (image > _LIT).astype(np.uint8) + (render(dotted, len(image)) > _LIT)


class Images(NamedTuple):
    """images: (n, R, R) uint8. labels: (n,), 1 where the dots are on one path. marks: from `mark`, if they are
    asked for."""

    images: UInt8[np.ndarray, "n R R"]
    labels: Int[np.ndarray, " n"]
    marks: UInt8[np.ndarray, "n R R"] | None = None


class PathfinderSpec(NamedTuple):
    """Which images are generated.

    resolution: pixels a side, 32, 64 or 128. dashes: of the long paths, 6, 9 or 14. marked: each with its `mark`.
    """

    resolution: int
    dashes: int = HARD
    marked: bool = False


def generate_images(rng: np.random.Generator, count: int, spec: PathfinderSpec) -> Images:
    """`count` images, half of them connected (one more or less where the count is odd)."""
    labels = rng.permutation((np.arange(count) + rng.integers(2)) % 2)
    scenes = [draw_scene(rng, spec.resolution, bool(label), spec.dashes) for label in labels]
    images = np.stack([render(scene, spec.resolution) for scene in scenes])
    marks = np.stack([mark(*pair) for pair in zip(scenes, images)]) if spec.marked else None
    return Images(images, labels, marks)


def _chunk(spec: PathfinderSpec, seed: int, split: int, index: int, count: int) -> Images:
    return generate_images(np.random.default_rng([seed, spec.resolution, split, index]), count, spec)


def generated(
    spec: PathfinderSpec, seed: int, sizes: dict[str, int], processes: int
) -> dict[str, Callable[[], Iterator[Images]]]:
    """The splits of a generated set, each the same for any number of processes."""
    chunk = functools.partial(_chunk, spec, seed)
    return in_processes(chunk, sizes, _CHUNK, processes, f"pathfinder{spec.resolution}")


def generated_source(spec: PathfinderSpec, seed: int, sizes: dict[str, int], processes: int) -> Source:
    """Images generated while they are read; their marks, if they have them, are second sequences."""

    def read(chunks: Callable[[], Iterator[Images]]) -> Iterator[tuple[Any, ...]]:
        for images, labels, marks in chunks():
            pixels = (images,) if marks is None else (images, marks)
            yield from zip(*(map(np.ndarray.tobytes, each) for each in pixels), labels.tolist())

    resolution, dashes, marked = spec
    splits = generated(spec, seed, sizes, processes)
    marks = ("marked",) if marked else ()
    return Source(
        f"generated pathfinder{resolution}" + ("" if dashes == HARD else f", paths of {dashes} dashes"),
        digest("pathfinder", resolution, dashes, SIZES[resolution], seed, sizes, *marks),
        {name: functools.partial(read, chunks) for name, chunks in splits.items()},
    )


# --- files ---


def write_release(
    out: str | os.PathLike[str], spec: PathfinderSpec, seed: int, sizes: dict[str, int], processes: int
) -> None:
    """Writes a folder in the layout of the Long Range Arena's release: LEVEL/imgs/N/sample_I.png, and
    LEVEL/metadata/N.npy, where LEVEL comes from `LEVELS`. Despite their name the metadata are text, a line an image:
    folder, file, number, label, dashes of the long and of the short paths, number of short paths. The folder is whole
    or not there.

    The splits are written one after the other without marks, as in the release; `open_files` splits them again.
    """
    with writing_folder(out) as folder:
        batch = 0
        for chunks in generated(spec, seed, sizes, processes).values():
            for images in chunks():
                _write_batch(folder / LEVELS[spec.dashes], batch, images, spec)
                batch += 1


def _write_batch(folder: Path, batch: int, images: Images, spec: PathfinderSpec) -> None:
    place = f"imgs/{batch}"
    paths = f"{spec.dashes} {_short(spec.dashes)} {SIZES[spec.resolution].short_paths}"
    (folder / place).mkdir(parents=True)
    (folder / "metadata").mkdir(exist_ok=True)
    lines = []
    for i, (image, label) in enumerate(zip(images.images, images.labels)):
        Image.fromarray(image).save(folder / place / f"sample_{i}.png")
        lines.append(f"{place} sample_{i}.png {i} {label} {paths}\n")
    (folder / "metadata" / f"{batch}.npy").write_text("".join(lines))


def _parse(line: bytes) -> tuple[str, int]:
    """The image's path and the label in a line of metadata; raises ValueError if it is malformed."""
    columns = line.decode(errors="replace").split()
    if len(columns) < 4:
        raise ValueError(f"expected at least 4 columns (folder, file, number, label), got {len(columns)}")
    if columns[3] not in ("0", "1"):
        raise ValueError(f"expected a label of 0 or 1 in column 4, got {shown(columns[3].encode())}")
    return f"{columns[0]}/{columns[1]}", int(columns[3])


def read_image(path: Path, resolution: int) -> bytes | None:
    """The grey pixels of an image file, row after row; None for an empty file; the release has some."""
    try:
        content = path.read_bytes()
        if not content:
            return None
        with Image.open(io.BytesIO(content)) as image:
            if image.size != (resolution, resolution):
                width, height = image.size
                raise UserError(
                    f"--data_dir: expected {resolution} x {resolution} pixels, got {width} x {height} in {path}"
                )
            return image.convert("L").tobytes()
    except UserError:
        raise
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"--data_dir: cannot read {path} (truncated?): {one_line(error)}") from error


def open_files(folder: Path, resolution: int, dashes: int = HARD) -> Source | None:
    """The release's images at one resolution: folder/pathfinderN/LEVEL, folder/LEVEL or the folder itself, with the
    level of `LEVELS`.

    Of ten images in the order of the metadata the ninth is for validation and the tenth for testing (80/10/10, as in
    the release). None if there are no such files.
    """
    level = LEVELS[dashes]
    for place in (folder / f"pathfinder{resolution}" / level, folder / level, folder):
        files = sorted((place / "metadata").glob("*.npy"), key=lambda path: (len(path.name), path.name))
        if files:
            stats = file_stats(files)
            splits = {split: functools.partial(_read, place, files, resolution, split) for split in SPLITS}
            return Source(f"pathfinder of {place}", digest("pathfinder files", stats, resolution), splits)
    return None


def _read(place: Path, files: list[Path], resolution: int, split: str) -> Iterator[tuple[bytes, int]]:
    tenths = {"train": range(8), "valid": (8,), "test": (9,)}[split]
    images = (image for path in files for image in parsed(path, numbered_lines(path), _parse))
    for number, (name, label) in enumerate(images):
        pixels = read_image(place / name, resolution) if number % 10 in tenths else None
        if pixels is not None:
            yield pixels, label
