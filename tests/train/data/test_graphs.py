"""Graphs: their files, token lists by metapath, subgraphs and batches."""

import gzip
import json

import numpy as np
import pytest

from tests.support.graphs import AUTHORS, PAPERS, write_graph
from tests.support.texts import damage
from train.data.graphs.batches import HeldOutNodes, NodeBatches
from train.data.graphs.documents import describe
from train.data.graphs.load import GraphDataConfig, load_graph
from train.data.graphs.poly_tokens import PolyTokens, metapath_graph, metapaths
from train.data.graphs.subgraphs import Subgraphs
from train.engine.errors import UserError


def load(folder, **options):
    return load_graph(
        GraphDataConfig(data_dir=str(folder), cache_dir=str(folder.parent / "cache"), **options)
    )


def sizes_of(graph):
    return tuple(len(graph.splits[split][0]) for split in ("train", "valid", "test"))


def test_a_folder_of_the_benchmark(tmp_path):
    authors = write_graph(tmp_path / "g")
    graph = load(tmp_path / "g", features=16)
    again = load(tmp_path / "g", features=16)  # from the cache
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".npz"]
    assert graph.counts == again.counts == (PAPERS, AUTHORS)
    # link.dat also has the reverse links.
    assert [(r.receiver, r.sender) for r in graph.relations] == [(1, 0), (0, 1)]
    to_papers = graph.relations[1].adjacency.toarray()
    assert [sorted(np.flatnonzero(row)) for row in to_papers] == [sorted(row) for row in authors]
    assert sizes_of(graph) == (24, 6, 30)
    assert sorted([*graph.splits["train"][0], *graph.splits["valid"][0]]) == list(range(30))
    assert all((labels == nodes % 3).all() for nodes, labels in graph.splits.values())
    np.testing.assert_array_equal(graph.features[1][:, :AUTHORS], graph.features[1][0, 0] * np.eye(AUTHORS))
    for a, b in zip(graph.features, again.features):
        np.testing.assert_array_equal(a, b)
        assert np.mean(np.sum(a**2, axis=1)) == pytest.approx(AUTHORS, rel=1e-4)
    (tmp_path / "g/info.dat").write_text(
        '{"node.dat": {"node type": {"0": "paper", "1": "author"}, "3": NaN}}'
    )
    assert load(tmp_path / "g").types == ("paper", "author")
    for other in ('{"node.dat": [], "label.dat": 3}', '{"node.dat": {"node type": []}}'):
        (tmp_path / "g/info.dat").write_text(other)
        assert load(tmp_path / "g").types == ("0", "1")


def test_other_links_are_another_graph(tmp_path):
    """The digest covers the links too, since resumed runs and other hosts look a graph up by it."""
    authors = write_graph(tmp_path / "g")
    other = next(PAPERS + a for a in range(AUTHORS) if a not in authors[0])
    changes = [("link.dat", 1, f"0\t{other}\t0\t1.0"), ("link.dat", 2 * PAPERS + 1, f"{other}\t0\t1\t1.0")]
    write_graph(tmp_path / "h", changes)
    graph, changed = load(tmp_path / "g"), load(tmp_path / "h")
    for a, b in zip(graph.features, changed.features):
        np.testing.assert_array_equal(a, b)
    assert [r.adjacency.nnz for r in graph.relations] == [r.adjacency.nnz for r in changed.relations]
    assert changed.digest != graph.digest


def test_nodes_of_several_classes(tmp_path):
    write_graph(tmp_path / "g", [("label.dat", 1, "0\t\t0\t2,0")])
    graph = load(tmp_path / "g")
    nodes = np.concatenate([graph.splits[split][0] for split in ("train", "valid")])
    labels = np.concatenate([graph.splits[split][1] for split in ("train", "valid")])
    assert graph.is_multi_label
    assert labels[nodes == 0].tolist() == [[1, 0, 1]]
    assert labels[nodes == 4].tolist() == [[0, 1, 0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("node.dat", 3, "0\tpaper\t0\t1,2,3,4,5")], "node.dat.gz, line 3: the node 0 stands there twice"),
        ([("node.dat", 3, "2\tpaper\t0\t1,2")], "line 3: expected 5 features, as of the type's other nodes, got 2"),
        ([("node.dat", 3, "2\tpaper\t0\t1,2,x,4,5")], "line 3: expected numbers separated by commas, got '1,2,x"),
        ([("node.dat", 3, "2\tpaper")], "line 3: expected at least 3 columns, got 2"),
        ([("node.dat", 61, "60\t\t5")], r"expected types from 0 on, got \[0, 1, 5\]"),
        ([("link.dat", 2, "0\t999\t0\t1")], "link.dat.gz, line 2: the link names the node 999, which node.dat does"),
        ([("link.dat", 2, "0\t1\t0\t1")], "line 2: links of type 0 join the node types 0 and 1, got 0 and 0"),
        ([("link.dat", 2, "0\tx\t0\t1")], "line 2: expected a number as to, got 'x'"),
        ([("label.dat.test", 4, "33\t\t0\t7")], "label.dat.test.gz, line 4: expected classes out of 0, 1, 2, got 7"),
        ([("label.dat", 4, "3\t\t0\t999")], "expected fewer classes than nodes of their type, got 999"),
        ([("label.dat.test", 4, "3\t\t0\t1")], "line 4: the node 3 has a label already"),
        ([("label.dat", 4, "61\t\t1\t1")], "line 4: expected a node of type 0, as the others, got type 1"),
        ([("label.dat", 4, "999\t\t0\t1")], "line 4: the label names the node 999, which node.dat does not have"),
    ],
)  # fmt: skip
def test_bad_lines(tmp_path, changes, message):
    write_graph(tmp_path / "g", changes)
    with pytest.raises(UserError, match=message):
        load(tmp_path / "g")
    assert not (tmp_path / "cache").exists()


def test_missing_and_damaged_files(tmp_path):
    write_graph(tmp_path / "g")
    (tmp_path / "g/info.dat").write_text("{\n\n}}")
    with pytest.raises(UserError, match=r"info\.dat is not JSON: .* line 3"):
        load(tmp_path / "g")
    (tmp_path / "g/info.dat").unlink()
    (tmp_path / "g/info.dat.gz").write_bytes(gzip.compress(b"{}"))
    damage(tmp_path / "g/info.dat.gz")
    with pytest.raises(UserError, match=r"info\.dat\.gz cannot be read: .*invalid block type"):
        load(tmp_path / "g")
    (tmp_path / "g/info.dat.gz").unlink()
    with pytest.raises(UserError, match=r"--nearest: expected 0, as .* has links"):
        load(tmp_path / "g", nearest=3)
    for name, what in (("link.dat", "links"), ("label.dat", "labels")):
        (tmp_path / "g" / name).write_text("\n")
        with pytest.raises(UserError, match=rf"g/{name} has no {what}"):
            load(tmp_path / "g")
        (tmp_path / "g" / name).unlink()
    (tmp_path / "g/link.dat.gz").unlink()
    with pytest.raises(UserError, match=r"expected .*link\.dat or link\.dat\.gz; there is neither"):
        load(tmp_path / "g")
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError, match=r"expected node.dat or train.jsonl in .*/x, or an .npz file"):
        load(tmp_path / "x")


def test_features_from_a_file(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    points = rng.standard_normal((40, 6)) + 8 * np.eye(6)[labels]
    np.savez(tmp_path / "a.npz", features=points, labels=labels)
    graph = load(tmp_path / "a.npz", features=6, nearest=3)
    assert sizes_of(graph) == (20, 10, 10)
    assert sorted(np.concatenate([nodes for nodes, _ in graph.splits.values()])) == list(range(40))
    links = graph.relations[0].adjacency.tocoo()
    assert (links.row != links.col).all()
    assert np.mean(labels[links.row] == labels[links.col]) > 0.95
    np.savez(tmp_path / "b.npz", features=points)
    np.savez_compressed(tmp_path / "d.npz", features=points, labels=labels)
    damage(tmp_path / "d.npz")
    (tmp_path / "e.npz").write_bytes(b"")
    np.save(tmp_path / "f.npy", points)
    (tmp_path / "f.npy").rename(tmp_path / "f.npz")
    for name in ("b.npz", "c.npz", "d.npz", "e.npz", "f.npz"):
        (tmp_path / "c.npz").write_bytes(b"x")
        with pytest.raises(UserError, match=f'{name}: expected an .npz file with "features" and "labels"'):
            load(tmp_path / name)


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (np.full((8, 3), "a"), np.arange(8) % 2, "expected features"),
        (
            np.ones((8, 3)),
            np.arange(7) % 2,
            r"expected features \(N, F\), real numbers, and N whole numbers as labels",
        ),
        (np.ones((8, 3), np.complex64), np.arange(8) % 2, "expected features .* got complex64"),
        (np.ones((8, 0)), np.arange(8) % 2, "expected features within float32, at least one a node"),
        (np.full((8, 3), 1e39), np.arange(8) % 2, "expected features within float32"),
        (np.ones((8, 3)), np.arange(8) * 2**59, "expected labels from 0 to fewer than the 8 nodes"),
        (np.ones((8, 3)), np.arange(8) - 1, "expected labels from 0 to fewer than the 8 nodes"),
    ],
    ids=["text", "fewer labels", "complex", "none", "large numbers", "large labels", "labels below 0"],
)
def test_features_and_labels_that_mean_nothing(features, labels, message, tmp_path):
    np.savez(tmp_path / "a.npz", features=features, labels=labels)
    with pytest.raises(UserError, match=rf"a\.npz: {message}"):
        load(tmp_path / "a.npz")


def test_images_are_described_by_their_edges(tmp_path):
    """Matches a float64 sum over the pixels; contrast and brightness don't matter, and a flat image gives zeros."""
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(3, 10, 13)).astype(np.uint8)
    found = describe(images)
    sums = np.zeros((3, 4, 4, 8))
    down, right = np.gradient(images.astype(np.float64), axis=(1, 2))
    rows, columns = [0, 2, 5, 7], [0, 3, 6, 9]
    for i, y, x in np.ndindex(images.shape):
        turn = (np.degrees(np.arctan2(down[i, y, x], right[i, y, x])) % 180) / 22.5
        cell = sums[i, np.searchsorted(rows, y, "right") - 1, np.searchsorted(columns, x, "right") - 1]
        length = np.hypot(down[i, y, x], right[i, y, x])
        cell[int(turn) % 8] += length * (1 - turn % 1)
        cell[(int(turn) + 1) % 8] += length * (turn % 1)
    sums = sums.reshape(3, 128)
    np.testing.assert_allclose(found, np.sqrt(sums / sums.mean(axis=1, keepdims=True)), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(describe(images / 2 + 10), found, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(describe(np.stack([images] * 3, -1)), found, rtol=1e-3, atol=1e-3)
    assert not describe(np.full((1, 4, 4), 7)).any()
    labels = np.arange(20).astype(np.uint8) % 2
    stripes = np.zeros((20, 8, 8), np.uint8)
    stripes[labels == 0, ::2], stripes[labels == 1, :, ::2] = 200, 200
    stripes += rng.integers(50, size=stripes.shape).astype(np.uint8)
    arrays = {"x_train": stripes[:15], "y_train": labels[:15], "x_test": stripes[15:], "y_test": labels[15:]}
    np.savez(tmp_path / "a.npz", **arrays)
    graph = load(tmp_path / "a.npz", nearest=2)
    assert graph.features[0].shape == (20, 128)
    links = graph.relations[0].adjacency.tocoo()
    assert (labels[links.row] == labels[links.col]).all()
    for name, array, message in (
        ("x_test", stripes[15:, 0], "expected .* with images as"),
        ("x_test", stripes[15:, :, :, None, None], "expected .* with images as"),
        ("y_train", labels, r"expected features \(N, F\), real numbers, and N whole numbers as labels"),
    ):
        np.savez(tmp_path / "b.npz", **{**arrays, name: array})
        with pytest.raises(UserError, match=message):
            load(tmp_path / "b.npz")


def test_posts(tmp_path):
    rows = [{"text": f"{'bat' if i % 2 else 'car'} wheel {i}", "label": i % 2} for i in range(40)]
    (tmp_path / "p").mkdir()
    for split, part in (("train", rows[:30]), ("test", rows[30:])):
        text = "\n".join(map(json.dumps, part))
        (tmp_path / f"p/{split}.jsonl").write_text(text)
        (tmp_path / f"p/{split}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match=r"--cache_dir: cannot write under .*/cache: File exists"):
        load(tmp_path / "p", features=8)
    (tmp_path / "cache").unlink()
    graph = load(tmp_path / "p", features=8)
    assert graph.counts == (40,)  # the same posts twice are not read twice
    assert np.linalg.matrix_rank(graph.features[0]) == 2  # "bat" or "car", and "wheel"
    for line in (
        '{"text": "b"}',
        "[" * 100_000,
        '{"text": "b", "label": -1}',
        '{"text": "b", "label": 1e999}',
    ):
        (tmp_path / "p/train.jsonl").write_text('{"text": "a", "label": 0}\n' + line)
        with pytest.raises(
            UserError, match=r'train.jsonl, line 2: expected an object with a "text" and a "label"'
        ):
            load(tmp_path / "p")
    (tmp_path / "p/train.jsonl").write_text(
        "\n".join(map(json.dumps, [*rows[:29], rows[29] | {"label": 10**9}]))
    )
    with pytest.raises(UserError, match="expected labels from 0 to fewer than the 40 nodes"):
        load(tmp_path / "p")


def test_token_lists_hold_means_along_metapaths_and_drawn_nodes(tmp_path):
    authors = write_graph(
        tmp_path / "g", [("link.dat", 1, None), ("link.dat", 1, None)]
    )  # paper 0 has no authors
    authors[0] = []
    # link.dat still has the reverse links; without the lines above, each direction would be a relation.
    graph = load(tmp_path / "g", features=16)
    assert metapaths(graph.relations[1:2], 0, 3) == [(0,)]
    relations = [r for r in graph.relations if r.adjacency.nnz == 2 * PAPERS - 2]
    one_way = graph.__class__(**{**vars(graph), "relations": tuple(relations)})
    assert metapaths(relations, 0, 2) == [(1,), (1, 0)]
    source = PolyTokens(one_way, metapath_length=2, neighbours=3, clusters=2)
    assert source.kinds == (0, 1, 2, 3, 3, 3, 4, 4, 4, 5, 5)
    features, present = source.rows(np.array([0, 7]))
    assert present[0].tolist() == [1, 0, 0] + [0] * 6 + [1, 1]
    own = graph.features[1][authors[7]]
    by_author = [[i for i in range(PAPERS) if a in authors[i]] for a in range(AUTHORS)]
    ends = np.array([graph.features[1][authors[i]].mean(axis=0) for i in range(1, PAPERS)])
    two = [graph.features[0][near].mean(axis=0) for near in by_author]
    twice = np.array([np.mean([two[a] for a in authors[i]], axis=0) for i in range(1, PAPERS)])
    for place, means in ((1, ends), (2, twice)):
        means = means - means.mean(axis=0)
        expected = means[6] / np.sqrt(np.mean(means**2))
        np.testing.assert_allclose(features[1, place], expected, rtol=1e-3, atol=1e-4)
    drawn = features[1, 3:6][present[1, 3:6] == 1]
    assert 1 <= len(drawn) <= 2
    assert all(any(np.array_equal(row, a) for a in own) for row in drawn)
    assert len(np.unique(drawn, axis=0)) == len(drawn)
    two_away = features[1, 6:9][present[1, 6:9] == 1]
    near = {i for a in authors[7] for i in by_author[a]}
    assert all(any(np.array_equal(row, graph.features[0][i]) for i in near) for row in two_away)


def test_nodes_are_linked_along_metapaths(tmp_path):
    """All papers of a paper's authors, or some of them; a paper without authors receives from itself alone."""
    authors = write_graph(
        tmp_path / "g", [("link.dat", 1, None)] * 2 + [("link.dat", 2 * PAPERS - 1, None)] * 2
    )
    authors[0] = []
    graph = load(tmp_path / "g", features=16)
    whole = metapath_graph(graph, 3, 0)
    assert (whole.counts, whole.target, [(r.receiver, r.sender) for r in whole.relations]) == (
        (PAPERS,),
        0,
        [(0, 0)],
    )
    near = [{i} | {j for j in range(PAPERS) if set(authors[i]) & set(authors[j])} for i in range(PAPERS)]
    assert [set(np.flatnonzero(row)) for row in whole.relations[0].adjacency.toarray()] == near
    drawn = metapath_graph(graph, 2, 3).relations[0].adjacency.toarray() > 0
    for i, row in enumerate(drawn):
        assert set(np.flatnonzero(row)) <= near[i]
        assert row[i]
        assert row.sum() <= 4
    assert drawn.sum() > 2 * PAPERS
    np.testing.assert_array_equal(metapath_graph(graph, 2, 3).relations[0].adjacency.toarray() > 0, drawn)
    with pytest.raises(UserError, match="--metapath_length: expected more than 1: no metapath leads back"):
        metapath_graph(graph, 1, 0)


def test_subgraphs_have_what_their_nodes_receive_from(tmp_path):
    authors = write_graph(tmp_path / "g")
    graph = load(tmp_path / "g", features=16)
    whole = Subgraphs(graph, hops=2, neighbours=0, targets=4).draw(np.array([3, 1, 1, 5]), 0)
    assert whole.present.all()
    assert whole.places.tolist() == [3, 1, 1, 5]
    assert len(whole.edges) == 4 * PAPERS
    assert (np.diff(whole.edges[:, 1]) >= 0).all()
    source = Subgraphs(graph, hops=2, neighbours=2, targets=2)
    asked = np.array([7, 4])
    found = source.draw(asked, 5)
    # The features of each type have mean 0 and unit size.
    papers, writers = (rows - rows.mean(axis=0) for rows in map(np.float64, graph.features))
    papers, writers = papers / np.sqrt(np.mean(papers**2)), writers / np.sqrt(np.mean(writers**2))
    np.testing.assert_allclose(found.features[found.places], papers[asked], rtol=1e-4, atol=1e-5)
    exists = found.edges[:, 1] < len(source.kinds)
    received = np.bincount(found.edges[exists, 1], minlength=len(source.kinds))
    assert received.max() == 2
    assert (found.present[found.edges[exists]] == 1).all()
    near = found.edges[found.edges[:, 1] == found.places[0], 0]
    expected = writers[sorted(authors[7])]
    np.testing.assert_allclose(
        np.sort(found.features[near], axis=0), np.sort(expected, axis=0), rtol=1e-4, atol=1e-5
    )
    assert (found.edges[~exists, 1] == len(source.kinds)).all()
    other = source.draw(np.array([3, 3]), 1)
    assert [a.shape for a in other] == [a.shape for a in found]


def test_every_training_node_once_a_pass_and_every_held_out_node_once(tmp_path):
    write_graph(tmp_path / "g")
    graph = load(tmp_path / "g", features=16)
    source = Subgraphs(graph, hops=2, neighbours=0, targets=5)
    nodes, labels = graph.splits["train"]
    stream = NodeBatches(source, nodes, labels, batch=2, targets=5, seed=0, digest="", has_edges=False)
    taken = np.concatenate([next(stream)["places"].reshape(-1) for _ in range(2)])
    assert len(set(taken)) == 20
    assert set(taken) <= set(nodes)
    stream.close()
    held = list(HeldOutNodes(source, *graph.splits["test"], batch=2, targets=4, has_edges=False))
    kept = np.concatenate([batch["places"][batch["weights"] > 0] for batch in held])
    assert kept.tolist() == graph.splits["test"][0].tolist()
    with pytest.raises(UserError, match="--batch: expected at most the 24 training nodes, got 25"):
        NodeBatches(source, nodes, labels, batch=25, targets=1, seed=0, digest="", has_edges=False)
