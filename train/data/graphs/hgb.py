"""Graphs in the text format of the Heterogeneous Graph Benchmark (Lv et al. 2021, arXiv:2112.14936).

A folder has, tab separated and without a header, node.dat (id, name, type, and features separated by commas, which may
be missing), link.dat (from, to, type, weight), label.dat and label.dat.test (id, name, type, and classes separated by
commas), each also as .gz, and info.dat (JSON), which names the types and classes and may be missing. Weights and names
are not used.
"""

from __future__ import annotations

import gzip
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from brl_jax.json_files import parse_json
from train.data.files import find_file, numbered_lines, packed_or_not, shown
from train.data.graphs.graph import RawGraph, both_ways
from train.engine.errors import UNREADABLE, UserError, one_line

_FILES = ("node.dat", "link.dat", "label.dat", "label.dat.test")


def is_hgb(folder: Path) -> bool:
    """Whether a folder has a file of nodes."""
    return find_file(folder / "node.dat") is not None


def hgb_files(folder: Path) -> list[Path]:
    """The files of a graph, including info.dat if it exists."""
    info = find_file(folder / "info.dat")
    return [packed_or_not(folder / name) for name in _FILES] + ([] if info is None else [info])


class _Nodes(NamedTuple):
    """The place of each id: place[id] = (type, place within the type); and the features' entries by type."""

    place: dict[int, tuple[int, int]]
    counts: tuple[int, ...]
    features: tuple[Any, ...]


def read_hgb(folder: Path) -> RawGraph:
    """The graph of a folder."""
    info = _info(folder)
    nodes = _read_nodes(packed_or_not(folder / "node.dat"))
    links = _read_links(packed_or_not(folder / "link.dat"), nodes)
    rows, classes, is_test, target = _read_labels(folder, nodes, info)
    number = max(max(row) for row in classes) + 1
    number = max(number, len(_names(info, "label.dat", "node type", str(target))))
    if number > max(nodes.counts[target], 2):
        raise UserError(
            f"--data_dir: {folder}: expected fewer classes than nodes of their type, got {number - 1}"
        )
    if any(len(row) > 1 for row in classes):
        labels = np.zeros((len(rows), number), np.int32)
        for label, row in zip(labels, classes):
            label[list(row)] = 1
    else:
        labels = np.array([row[0] for row in classes], np.int32)
    names = _names(info, "node.dat", "node type")
    types = tuple(str(names.get(str(kind), kind)) for kind in range(len(nodes.counts)))
    return RawGraph(
        name=str(folder),
        types=types,
        counts=nodes.counts,
        features=nodes.features,
        relations=both_ways(links, nodes.counts),
        target=target,
        nodes=np.array(rows, np.int64),
        labels=labels,
        is_test=np.array(is_test, bool),
        num_classes=max(number, 2),
    )


def _info(folder: Path) -> dict[str, Any]:
    path = find_file(folder / "info.dat")
    if path is None:
        return {}
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            # IMDB's file has numbers that are not finite, among names that nothing here reads.
            return parse_json(file.read().replace(b": NaN", b": null"), dict, os.fspath(path))
    except ValueError as error:
        raise UserError(f"--data_dir: {error}") from error
    except UNREADABLE as error:
        raise UserError(f"--data_dir: {path} cannot be read: {one_line(error)}") from error


def _names(info: dict[str, Any], *keys: str) -> dict[str, Any]:
    found: Any = info
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _fields(path: Path, least: int) -> Iterator[tuple[int, list[bytes]]]:
    for number, line in numbered_lines(path):
        fields = line.split(b"\t")
        if len(fields) < least:
            raise _wrong(path, number, f"expected at least {least} columns, got {len(fields)}: {shown(line)}")
        yield number, fields


def _wrong(path: Path, line: int, message: str) -> UserError:
    return UserError(f"--data_dir: {path}, line {line}: {message}")


def _whole(path: Path, line: int, name: str, text: bytes) -> int:
    if not text.strip().isdigit():
        raise _wrong(path, line, f"expected a number as {name}, got {shown(text)}")
    return int(text)


def _numbers(text: bytes) -> np.ndarray:
    """The numbers of a comma-separated list. Raises ValueError."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error", DeprecationWarning
        )  # older numpys warn about text that is not a number
        try:
            values = np.fromstring(text, np.float32, sep=",")
        except (ValueError, DeprecationWarning) as error:
            raise ValueError(f"expected numbers separated by commas, got {shown(text)}") from error
    if not np.isfinite(values).all():
        raise ValueError(f"expected finite numbers, got {shown(text)}")
    return values


def _read_nodes(path: Path) -> _Nodes:
    place: dict[int, tuple[int, int]] = {}
    counts: dict[int, int] = {}
    widths: dict[int, int] = {}
    entries: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for number, fields in _fields(path, 3):
        node, kind = (_whole(path, number, name, text) for name, text in zip(("id", "type"), fields[::2]))
        if node in place:
            raise _wrong(path, number, f"the node {node} stands there twice")
        try:
            values = _numbers(fields[3]) if len(fields) > 3 and fields[3].strip() else np.zeros(0, np.float32)
        except ValueError as error:
            raise _wrong(path, number, str(error)) from error
        if widths.setdefault(kind, len(values)) != len(values):
            raise _wrong(
                path,
                number,
                f"expected {widths[kind]} features, as of the type's other nodes, got {len(values)}",
            )
        place[node] = (kind, counts.get(kind, 0))
        counts[kind] = counts.get(kind, 0) + 1
        at = np.flatnonzero(values)
        entries.setdefault(kind, []).append((at.astype(np.int32), values[at]))
    if not place:
        raise UserError(f"--data_dir: {path} has no nodes")
    if sorted(counts) != list(range(len(counts))):
        raise UserError(f"--data_dir: {path}: expected types from 0 on, got {sorted(counts)}")
    features = []
    for kind in range(len(counts)):
        sizes = np.cumsum([0, *(len(at) for at, _ in entries[kind])])
        columns, values = (np.concatenate(parts) for parts in zip(*entries[kind]))
        shape = (counts[kind], widths[kind])
        features.append(sp.csr_matrix((values, columns, sizes), shape=shape))
    return _Nodes(place, tuple(counts[kind] for kind in range(len(counts))), tuple(features))


def _read_links(path: Path, nodes: _Nodes) -> dict[str, tuple[int, int, np.ndarray, np.ndarray]]:
    types: dict[int, tuple[int, int]] = {}
    found: dict[int, tuple[list[int], list[int]]] = {}
    for number, fields in _fields(path, 3):
        start, end, kind = (
            _whole(path, number, name, text) for name, text in zip(("from", "to", "type"), fields)
        )
        for node in (start, end):
            if node not in nodes.place:
                raise _wrong(path, number, f"the link names the node {node}, which node.dat does not have")
        (start_type, start_at), (end_type, end_at) = nodes.place[start], nodes.place[end]
        pair = types.setdefault(kind, (start_type, end_type))
        if pair != (start_type, end_type):
            raise _wrong(
                path,
                number,
                f"links of type {kind} join the node types {pair[0]} and {pair[1]}, got {start_type} and {end_type}",
            )
        starts, ends = found.setdefault(kind, ([], []))
        starts.append(start_at)
        ends.append(end_at)
    if not found:
        raise UserError(f"--data_dir: {path} has no links")
    return {
        str(kind): (*types[kind], np.array(starts), np.array(ends))
        for kind, (starts, ends) in sorted(found.items())
    }


def _read_labels(
    folder: Path, nodes: _Nodes, info: dict[str, Any]
) -> tuple[list[int], list[tuple[int, ...]], list[bool], int]:
    """The labelled nodes' places, their classes, whether they are for the test, and their type."""
    rows: list[int] = []
    classes: list[tuple[int, ...]] = []
    is_test: list[bool] = []
    seen: set[int] = set()
    target: int | None = None
    known: set[int] = set()
    names: dict[str, Any] = {}
    for name in ("label.dat", "label.dat.test"):
        path = packed_or_not(folder / name)
        for number, fields in _fields(path, 4):
            node = _whole(path, number, "id", fields[0])
            if node not in nodes.place:
                raise _wrong(path, number, f"the label names the node {node}, which node.dat does not have")
            if node in seen:
                raise _wrong(path, number, f"the node {node} has a label already")
            kind, at = nodes.place[node]
            if target is None:
                names = _names(info, "label.dat", "node type", str(kind))
                target, known = kind, {int(key) for key in names if key.isdecimal()}
            if kind != target:
                raise _wrong(
                    path, number, f"expected a node of type {target}, as the others, got type {kind}"
                )
            own = tuple(_whole(path, number, "class", text) for text in fields[3].split(b","))
            unknown = [label for label in own if label not in known]
            if unknown and (name != "label.dat" or names):
                expected = ", ".join(map(str, sorted(known)))
                raise _wrong(path, number, f"expected classes out of {expected}, got {unknown[0]}")
            known.update(own)
            seen.add(node)
            rows.append(at)
            classes.append(own)
            is_test.append(name != "label.dat")
        if not rows or (name != "label.dat" and not is_test[-1]):
            raise UserError(f"--data_dir: {path} has no labels")
    assert target is not None
    return rows, classes, is_test, target
