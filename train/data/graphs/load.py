"""The graph that the command line names, made once and kept in a folder that runs may share."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from brl_jax.fields import Checked, Count, Natural, Seed
from train.data.files import file_stats
from train.data.graphs.documents import nearest, post_files, read_nodes, read_posts
from train.data.graphs.graph import Graph, Relation, digest_of, reduced, split_nodes
from train.data.graphs.hgb import hgb_files, is_hgb, read_hgb
from train.data.splits import SPLITS
from train.engine.errors import UserError, reason
from train.engine.fields import Free, Needed
from train.engine.folder import leaving_no_empty
from train.engine.storage import check_local, digest, user_cache, writing

# Part of every key: after a change of how files become arrays, the arrays of older versions must not be read.
_FORMAT = 3
# The fields of a graph that JSON can represent.
_PLAIN = ("name", "types", "counts", "target", "num_classes", "digest")


@dataclasses.dataclass(frozen=True)
class GraphDataConfig(Checked):
    """The graph, and what a network sees of it."""

    data_dir: Needed[str] = ""
    """A folder of the Heterogeneous Graph Benchmark (node.dat, link.dat, label.dat, label.dat.test), a folder of posts
    (train.jsonl, test.jsonl), or an .npz file with "features" and "labels", or with images as "x_train", "y_train",
    "x_test" and "y_test"."""
    features: Count = 512
    """Largest number of features of a node; longer ones are projected to their principal directions."""
    split_seed: Seed = 0
    """Seed of the choice of the validation nodes, and of the test nodes where the files don't name them."""
    metapath_length: Count = 2
    """Links of the longest metapath. In token lists each metapath gives a token, the mean of the nodes at its end; in
    HAN each one that leads back to the classified type is a kind of edges."""
    neighbours: Natural = 0
    """Token lists: nodes drawn at the end of each metapath of one or two links, a token each. Networks that read edges:
    the edges drawn for each node of a subgraph, in HAN for each node and metapath; 0: all edges of the graph."""
    clusters: Natural = 0
    """Token lists: number of additional tokens, the centres of that many clusters of nodes."""
    nearest: Natural = 0
    """Files without links: a node is linked to this many nearest nodes."""
    row_targets: Natural = 0
    """Networks over graphs: nodes of a row whose classes are learned; 0: all training nodes, shared by the rows."""
    cache_dir: Free[str | None] = None
    """Local folder of the arrays made from the files; by default ~/.cache/brl-jax/graphs."""

    def __post_init__(self):
        check_local("cache_dir", self.cache_dir)


def load_graph(config: GraphDataConfig) -> Graph:
    """The graph of a configuration."""
    try:
        import sklearn  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError("train.graph needs scikit-learn: pip install -e '.[graph]'") from error
    if not config.data_dir:
        raise UserError("--data_dir: expected a folder or a file, got none")
    source = Path(config.data_dir).expanduser()
    if not source.exists():
        raise UserError(f"--data_dir: no file or folder {source}")
    is_linked = is_hgb(source)
    if is_linked and config.nearest:
        raise UserError(f"--nearest: expected 0, as {source} has links, got {config.nearest}")
    files = hgb_files(source) if is_linked else post_files(source) or [source]
    if source.is_dir() and files == [source]:
        raise UserError(f"--data_dir: expected node.dat or train.jsonl in {source}, or an .npz file")
    key = digest(_FORMAT, file_stats(files), config.features, config.split_seed, config.nearest)[:16]
    folder = user_cache() / "graphs" if config.cache_dir is None else Path(config.cache_dir).expanduser()
    path = folder / f"{key}.npz"
    if not path.is_file():
        graph = _make(config, source, is_linked)
        try:
            with leaving_no_empty(folder):
                folder.mkdir(parents=True, exist_ok=True)
                _save(graph, path)
        except OSError as error:
            raise UserError(f"--cache_dir: cannot write under {folder}: {reason(error)}") from error
    return _read(path)


def _make(config: GraphDataConfig, source: Path, is_linked: bool) -> Graph:
    if is_linked:
        raw = read_hgb(source)
    else:
        raw = read_posts(source) if source.is_dir() else read_nodes(source)
        if config.nearest >= raw.counts[0]:
            raise UserError(f"--nearest: expected fewer than the {raw.counts[0]} nodes, got {config.nearest}")
    relations = raw.relations
    if config.nearest:
        relations = (nearest(raw, config.nearest),)
    splits, features = split_nodes(raw, config.split_seed), reduced(raw, config.features)
    return Graph(
        raw.name,
        raw.types,
        raw.counts,
        features,
        relations,
        raw.target,
        splits,
        raw.num_classes,
        digest_of(features, relations, splits),
    )


def _save(graph: Graph, path: Path) -> None:
    about = {name: getattr(graph, name) for name in _PLAIN}
    about["relations"] = [relation[:3] for relation in graph.relations]
    arrays: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    arrays |= {f"features_{i}": array for i, array in enumerate(graph.features)}
    for i, relation in enumerate(graph.relations):
        arrays |= {f"indptr_{i}": relation.adjacency.indptr, f"indices_{i}": relation.adjacency.indices}
    for split, (nodes, labels) in graph.splits.items():
        arrays |= {f"{split}_nodes": nodes, f"{split}_labels": labels}
    with writing(path) as [aside], open(aside, "wb") as file:
        np.savez(file, **arrays)


def _read(path: Path) -> Graph:
    with np.load(path) as file:
        about = json.loads(file["about"].tobytes())
        counts = tuple(about["counts"])
        relations = []
        for i, (name, receiver, sender) in enumerate(about["relations"]):
            indptr, indices = file[f"indptr_{i}"], file[f"indices_{i}"]
            matrix = sp.csr_matrix(
                (np.ones(len(indices), np.float32), indices, indptr), shape=(counts[receiver], counts[sender])
            )
            relations.append(Relation(name, receiver, sender, matrix))
        plain = {name: about[name] for name in _PLAIN} | {"types": tuple(about["types"]), "counts": counts}
        return Graph(
            **plain,
            features=tuple(file[f"features_{i}"] for i in range(len(counts))),
            relations=tuple(relations),
            splits={split: (file[f"{split}_nodes"], file[f"{split}_labels"]) for split in SPLITS},
        )
