"""eval.graph_maps: maps with tokens in position, weights across classes, and both pictures."""

import json

import jax
import numpy as np
import pytest

import eval.studies.graph_maps
import train.graph
from brl_jax.layers import BRLConfig, LocalConfig
from brl_jax.models.graph import GraphConfig, NodeClassifier
from eval.studies.graph_maps import across_classes, set_maps
from tests.support.graphs import TINY, write_graph
from tests.support.parameters import drawn

SIZES = {
    "kinds": (0, 1, 2, 3, 4),
    "num_features": 6,
    "num_layers": 2,
    "d_model": 8,
    "num_heads": 2,
    "d_ff": 8,
}


def maps_of(mechanism, present):
    model = NodeClassifier(GraphConfig(mechanism=mechanism, **SIZES))
    features = np.random.default_rng(0).standard_normal((1, 5, 6)).astype(np.float32)
    present = np.array([present], np.int32)
    params = drawn(model.init, features, present)["params"]
    return *set_maps(model, jax.tree.map(np.asarray, params), features, present), model, params, features


def test_absent_tokens_have_no_weight_and_the_others_stand_in_their_places():
    layers, outputs, *_ = maps_of(LocalConfig(window=2), [1, 0, 1, 1, 1])
    assert sorted(layers) == [0, 1]
    assert outputs.shape == (1, 5, 8)
    # Windows of one on each side follow the order of the existing tokens: 0, 2, 3, 4.
    expected = np.zeros((5, 5), bool)
    for i, j in ((0, 0), (0, 2), (2, 0), (2, 2), (2, 3), (3, 2), (3, 3), (3, 4), (4, 3), (4, 4)):
        expected[i, j] = True
    for maps in layers.values():
        assert maps.score is None
        assert ((maps.local > 0) == expected).all()
        np.testing.assert_allclose(maps.local.sum(-1)[..., expected.any(1)], 1.0, rtol=1e-5)


def test_the_score_is_what_compressed_tokens_pass_on():
    layers, *_ = maps_of(BRLConfig(window=2, num_compressed=3, block_size=None), [1, 0, 1, 1, 1])
    for maps in layers.values():
        assert maps.compress.shape == (1, 2, 3, 5)
        assert maps.propagate.shape == (1, 2, 5, 3)
        np.testing.assert_allclose(maps.score[0, 1], maps.propagate[0, 1] @ maps.compress[0, 1], rtol=1e-5)
        assert (maps.score[:, :, 1] == 0).all()
        assert (maps.score[..., 1] == 0).all()
        assert np.abs(maps.score[0, 0, 0, 4]) > 0


def test_weights_across_classes():
    weights = np.array([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0], [1.0, 0.0, 0.0]])
    assert across_classes(weights, np.array([0, 0, 1])) == 4 / 8
    assert across_classes(np.zeros((3, 3)), np.array([0, 0, 1])) == 0.0


def trained(tmp_path, preset, data):
    train.graph.main(
        f"{preset} --workdir {tmp_path}/{preset} --data_dir {data} --cache_dir {tmp_path}/cache {TINY} "
        "--steps 2 --eval_every 2 --checkpoint_every 2".split()
    )


@pytest.mark.slow
def test_runs_on_lists_and_on_sets_are_drawn(tmp_path, capsys):
    write_graph(tmp_path / "g")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "f.npz", features=rng.standard_normal((80, 6)), labels=rng.integers(0, 3, 80))
    pictures = []
    for names, data, batch in (
        (("acm-brl",), tmp_path / "g", " --batch 8"),
        (("images-local", "images-brl"), tmp_path / "f.npz", ""),
    ):
        for name in names:
            trained(tmp_path, name, f"{data}{batch}")
        capsys.readouterr()
        pictures.append(tmp_path / f"{names[0]}.png")
        folders = [str(tmp_path / name) for name in names]
        eval.studies.graph_maps.main(["--workdir", *folders, "--nodes", "50", "--picture", str(pictures[-1])])
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [result["workdir"] for result in found] == folders
        assert all(result["layers"][0]["local"] == pytest.approx(1.0, rel=1e-4) for result in found)
        assert ("row_sum_absolute" in found[0]["layers"][0]) == (names[0] == "acm-brl")
        assert ("across_classes_local" in found[0]["layers"][0]) == (names[0] == "images-local")
    assert all(picture.stat().st_size > 1000 for picture in pictures)
