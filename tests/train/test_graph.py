"""Node classification as a user runs it: measured, on a mesh, and better with neighbours."""

import json

import numpy as np
import pytest

import eval.tasks.graph
import train.graph
from eval.tasks.graph import f1_scores, markdown, paper_figures, summarise
from tests.support.command_lines import last_wins
from tests.support.graphs import TINY, write_graph
from tests.support.logs import metrics_lines


def run(workdir, folder, more=""):
    train.graph.main(
        last_wins(
            f"{more or 'acm-brl'} --workdir {workdir} --data_dir {folder / 'g'} --cache_dir {folder / 'cache'} "
            f"{TINY} --steps 6 --eval_every 3 --checkpoint_every 2"
        )
    )


def test_scores_of_classes_and_of_several_classes():
    true = np.array([0, 0, 0, 1, 2, 2])
    predicted = np.array([0, 0, 1, 1, 2, 0])
    f1 = np.mean([2 * 2 / (3 + 3), 2 * 1 / (1 + 2), 2 * 1 / (2 + 1)])
    assert f1_scores(predicted, true) == {
        "micro_f1": pytest.approx(100 * 4 / 6),
        "macro_f1": pytest.approx(100 * f1),
    }
    several = f1_scores(np.array([[1, 0], [1, 0]]), np.array([[1, 0], [0, 1]]))
    assert several == {"micro_f1": pytest.approx(50.0), "macro_f1": pytest.approx(100 / 3)}


def test_averages_of_seeds_next_to_the_paper():
    base = {"dataset": "ACM", "network": "brl", "macro_f1": 90.0, "step_megabytes": 1234.0}
    results = [{**base, "micro_f1": value} for value in (92.0, 94.0)]
    assert summarise(results)["ACM", "brl"]["micro_f1"] == (93.0, pytest.approx(2**0.5), 2)
    assert "| ACM | brl | 93.00 ± 1.41 (2) [93.78] | 90.00 ± 0.00 (2) [93.81] | 1,234 |" in markdown(results)
    assert "| ACM | brl | 92.00 (1) [93.78] | 90.00 (1) [93.81] | 1,234 |" in markdown(results[:1])
    assert paper_figures("imdb", "gcn") == (64.82, 57.88)
    assert paper_figures("20news", "brl") == (65.19,)
    assert paper_figures("ACM", "mlp") == paper_figures("mine", "brl") == ()
    assert paper_figures("cifar10_gray", "brl") == ()
    assert paper_figures("mini_imagenet", "brl") == (87.55,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "labels", "score"),
    [
        ("acm-brl --batch 8", "0", "accuracy"),
        ("acm-simple_hgn --neighbours 2 --batch 2", "0", "accuracy"),
        ("imdb-gat", "0,2", "node_f1"),
        ("images-brl", "0", "accuracy"),
    ],
)
def test_training_as_a_user_runs_it(tmp_path, capsys, preset, labels, score):
    """Token lists, subgraphs, a whole graph whose nodes may have several classes, and a set of all nodes: each run is
    measured and drawn."""
    write_graph(tmp_path / "g", [("label.dat", 1, f"0\t\t0\t{labels}")])
    run(tmp_path / "runs/whole", tmp_path, preset)
    assert f"val_{score}" in metrics_lines(tmp_path / "runs/whole")[-1]
    capsys.readouterr()
    eval.tasks.graph.main(["--table", str(tmp_path / "runs"), "--picture", str(tmp_path / "graph.png")])
    assert "| g | " in capsys.readouterr().out
    eval.tasks.graph.main(["--workdir", str(tmp_path / "runs/whole")])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["nodes"] == 30
    assert 0.01 < result["step_megabytes"] < 10
    assert (tmp_path / "graph.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "learns"),
    [
        (name, name != "mlp")
        for name in ("mlp", "gcn", "rgcn", "gat", "simple_hgn", "hgt", "han", "full", "brl")
    ],
)
def test_a_network_with_neighbours_learns_what_an_mlp_cannot(tmp_path, capsys, network, learns):
    """The nodes' features are random; a node has the same class as the nodes it is linked to."""
    write_graph(tmp_path / "g", papers=240)
    batch = "--batch 32" if network in ("full", "brl") else "--neighbours 0" if network == "han" else ""
    train.graph.main(
        f"acm-{network} --workdir {tmp_path}/run --data_dir {tmp_path}/g --cache_dir {tmp_path}/cache {TINY} {batch} "
        "--steps 80 --eval_every 10 --learning_rate 1e-2 --dropout 0.1 --input_dropout 0".split()
    )
    capsys.readouterr()
    eval.tasks.graph.main(["--workdir", f"{tmp_path}/run"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["micro_f1"]
    assert found > 90 if learns else found < 55


@pytest.mark.slow
@pytest.mark.xdist_group("devices")
@pytest.mark.parametrize("name", ["tokens", "edges", "nodes"])
def test_eight_devices_learn_what_one_does(devices, name):
    one, eight = devices.ask("tests.train.graph_meshes", name)
    # The features are random, so a set, which has no links, can only memorize its training nodes.
    assert one[-2 if name == "nodes" else -1] < one[0]
    np.testing.assert_allclose(eight, one, rtol=2e-4)
