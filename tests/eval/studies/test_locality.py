"""eval.locality: the locally accumulated attention score and the command."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import FullConfig, LocalConfig
from brl_jax.models import DecoderConfig
from eval.studies.locality import RATIOS, area, layer_weights, locally_accumulated_score, main, uniform_score
from tests.support.command_lines import config_of
from tests.support.parameters import drawn
from tests.support.runs import untrained
from tests.support.texts import write_splits
from train.data.dataset import load
from train.engine.errors import UserError
from train.tasks.lm import LM

TINY = "--length 16 --num_layers 2 --d_model 16 --num_heads 2 --d_ff 16"


def _expected(weights, i, ratio):
    """The definition for one row of a matrix, entry by entry."""
    length = len(weights)
    size = max(1, int(ratio * length + 0.5))
    start = i - size // 2
    start = min(max(start, 0), length - size)
    inside = sum(abs(weights[i][j]) for j in range(start, start + size))
    return inside / sum(abs(weights[i][j]) for j in range(length))


def test_score_is_the_definition():
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((3, 2, 9, 9)).astype(np.float32)
    ratios = (0.01, 0.3, 1 / 3, 0.5, 0.9, 1.0)
    got = locally_accumulated_score(jnp.asarray(weights), ratios)
    assert got.shape == (3, 2, 9, 6)
    for index in np.ndindex(3, 2):
        for i in range(9):
            expected = [_expected(weights[index].astype(np.float64), i, ratio) for ratio in ratios]
            np.testing.assert_allclose(got[index][i], expected, rtol=1e-5)
    np.testing.assert_allclose(got[..., -1], 1.0, rtol=1e-5)


def test_score_of_known_matrices():
    ratios = (0.1, 0.5, 1.0)
    np.testing.assert_allclose(locally_accumulated_score(jnp.eye(10), ratios), 1.0)
    far = jnp.eye(10)[:, ::-1]  # each position attends to its mirror image
    got = np.asarray(locally_accumulated_score(far, ratios))
    assert got[0].tolist() == [0, 0, 1]
    assert got[4].tolist() == [0, 1, 1]  # 5 is next to it
    empty = locally_accumulated_score(jnp.zeros((10, 10)), ratios)
    np.testing.assert_array_equal(empty, 0.0)


def test_uniform_score():
    # Of i + 1 keys, those among the 4 positions from i - 2 on: 1, 2/2, 3/3, 3/4, 3/5, 3/6, and at the end 4/7, 4/8.
    expected = np.mean([1, 1, 1, 3 / 4, 3 / 5, 3 / 6, 3 / 7, 4 / 8])
    np.testing.assert_allclose(uniform_score(8, (0.5,)), [expected], rtol=1e-6)


def test_area():
    assert area((0.5, 1.0), (0.5, 1.0)) == pytest.approx(0.5)
    assert area((0.5, 1.0), (1.0, 1.0)) == pytest.approx(0.75)


def test_layers_are_numbered_in_the_order_of_the_network():
    """Scanned periods and runs are returned as single layers; layers that sow nothing are left out."""
    alternate = DecoderConfig(
        num_layers=4, mechanism=FullConfig(), late_mechanism=LocalConfig(), schedule="alternate"
    )
    sown = {
        "layers_0": {
            "block_0": {"mixer": {"weights": (jnp.asarray([0.0, 2.0]),)}},
            "block_1": {"mixer": {"local": {"weights": (jnp.asarray([1.0, 3.0]),)}, "other": (jnp.ones(2),)}},
        }
    }
    found = layer_weights(alternate, {"stack": sown})
    assert {layer: [float(x) for x in xs] for layer, xs in found.items()} == {0: [0], 1: [1], 2: [2], 3: [3]}

    split = DecoderConfig(num_layers=3, mechanism=FullConfig(), late_mechanism=LocalConfig())
    sown = {"layers_1": {"block_0": {"mixer": {"weights": (jnp.asarray([7.0]),)}}}}
    found = layer_weights(split, {"stack": sown})
    assert {layer: [float(x) for x in xs] for layer, xs in found.items()} == {2: [7]}

    parallel = DecoderConfig(
        num_layers=1, mechanism=FullConfig(), late_mechanism=LocalConfig(), schedule="parallel"
    )
    both = {name: {"weights": (jnp.asarray([float(i)]),)} for i, name in enumerate(("first", "second"))}
    found = layer_weights(parallel, {"stack": {"layers_0": {"block_0": {"mixer": both}}}})
    assert {layer: [float(x) for x in xs] for layer, xs in found.items()} == {0: [0, 1]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with full attention after local and one of BRL, before their first step, on a short text."""
    folder = tmp_path_factory.mktemp("runs")
    text = write_splits(folder, "a word follows another word and so on\n" * 9)
    for name, mechanism in {
        "mixed": "--mechanism local --mechanism.window 4 --late_mechanism full",
        "brl": "--mechanism brl --mechanism.window 2 --mechanism.num_compressed 2 --mechanism.memory output "
        "--mechanism.block_size 16",
    }.items():
        config = config_of(LM, f"small --workdir {folder}/{name} --data {text} {TINY} {mechanism}")
        load(config.data, config.loop.workdir)
        # Full attention to such small keys is nearly uniform.
        params = drawn(LM.objective(LM.model(config), config).init)
        untrained(LM, config, jax.tree.map(lambda x: x / 10, params))
    return folder


@pytest.mark.slow
def test_command(runs, capsys, tmp_path):
    picture = tmp_path / "locality.png"
    argv = ["--length", "16", "--sequences", "3"]
    main(["--workdir", f"{runs}/mixed", f"{runs}/brl", *argv, "--picture", str(picture)])
    mixed, brl = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert mixed["mechanism"] == "local+full"
    assert [layer["layer"] for layer in mixed["layers"]] == [0, 1]
    local, full = (layer["score"] for layer in mixed["layers"])
    # A window of 4 lies within 8 positions around its token; the untrained full attention is nearly uniform.
    np.testing.assert_allclose(local[9:], 1.0, rtol=1e-5)
    np.testing.assert_allclose(full, uniform_score(16, RATIOS), atol=0.1)
    assert full[9] < 0.9
    np.testing.assert_allclose(mixed["score"], np.mean([local, full], axis=0), rtol=1e-6)
    assert mixed["layers"][0]["area"] > mixed["layers"][1]["area"]
    assert mixed["uniform_area"] == pytest.approx(area(RATIOS, uniform_score(16, RATIOS)))
    np.testing.assert_allclose(brl["score"][1:], 1.0, rtol=1e-5)  # its local attention sees one token back
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workdir", "{runs}/brl", "--length", "17"], "--length: .*brl takes 16 tokens .*at once, got 17"),
        (["--workdir", "{runs}/mixed", "--length", "9999"], "--length: the text has .* tokens, got 9999"),
        pytest.param(
            ["--workdir", "{runs}/mixed", "--split", "test", "--length", "4"],
            "--data: .* has no test text",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bad_input(runs, argv, message):
    with pytest.raises(UserError, match=message):
        main([word.format(runs=runs) for word in argv])


def test_a_mechanism_without_a_matrix(runs, monkeypatch):
    monkeypatch.setattr("eval.studies.locality.layer_weights", lambda config, maps: {})
    with pytest.raises(UserError, match=r"brl.* exposes no attention matrix"):
        main(["--workdir", f"{runs}/brl", "--length", "16"])
