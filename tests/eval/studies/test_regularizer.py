"""eval.regularizer and eval.signal_to_noise: equations 15 to 18 of BRL-Attention against direct calculations."""

import dataclasses
import json
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eval.studies.regularizer
import eval.studies.signal_to_noise
from eval.harness.output import Measured
from eval.harness.runs import Run, first_rows
from eval.studies.locality import sown_maps
from eval.studies.regularizer import layer_maps, reconstructed_score, summary
from eval.studies.signal_to_noise import compare, draw, relevant_tokens
from tests.oracles.parts import norm, project, softmax
from tests.support.command_lines import config_of
from tests.support.runs import untrained
from train.data.recall import draw_rows
from train.tasks.recall import PRESETS, RECALL

OPTIONS = (
    "--num_layers 1 --d_model 16 --num_heads 2 --d_ff 16 --mechanism.num_compressed 3 --mechanism.block_size 8 "
    "--mechanism.history_size 12 --mechanism.window 4 --mechanism.compress_positions none --length 64 --pairs 4"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder, configuration and parameters of a run before its first step."""
    folder = tmp_path_factory.mktemp("run")
    config = RECALL.sized(config_of(RECALL, f"brl --workdir {folder} {OPTIONS}"))
    objective = RECALL.objective(RECALL.model(config), config)
    params = nn.unbox(jax.jit(objective.init)(jax.random.key(0)))
    # Strong preferences, with both signs of gamma.
    stream = params["stack"]["layers_0"]["block_0"]["mixer"]["compressed"]
    stream["compress_query"]["kernel"] *= 8.0
    stream["gamma"] = jnp.asarray([[[1.0, 1.0], [0.4, -0.6], [0.1, 0.3]]])
    untrained(RECALL, config, params)
    return folder, config, params


def _direct(config, params, tokens):
    """S1, S2, gamma and S_prop for every block of a row, from the parameters: (heads, 3, history) and (heads, 8, 3)."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    layer = jax.tree.map(lambda x: x[0], params["stack"]["layers_0"]["block_0"])
    d = config.model.dimensions
    u = norm(params["embedding"][tokens] * math.sqrt(16), layer["mixer_norm"], d.norm)
    mixer, c = layer["mixer"], layer["mixer"]["compressed"]
    ct = params["stack"]["carrier_0"]["tokens"]
    query = project(ct, c["compress_query"])
    gamma = np.exp(c["gamma"][0] * c["gamma"][1]) - np.exp(c["gamma"][0] * c["gamma"][2])
    scale = 1 / math.sqrt(8)
    for start in range(8, len(tokens), 8):
        source = u[max(0, start - 12) : start]
        every = np.ones((3, len(source)), bool)
        keys = project(source, c["compress_source"])  # (T, 3, N, H): keys, values, contrasting keys
        weights = [
            [softmax(query[:, a] @ keys[:, part, a].T * scale, every) for a in range(2)] for part in (0, 2)
        ]
        yield start, np.stack(weights[0]), np.stack(weights[1]), gamma, u, mixer


@pytest.mark.slow
def test_the_map_is_the_product_of_both_weights(run):
    """Equation 15: S_comp from the parameters in float64, block by block."""
    _, config, params = run
    tokens = draw_rows(config.data, config.data.cases[0], (3,), 2)["tokens"]
    ((local, score),) = layer_maps(RECALL.model(config), params, tokens).values()
    maps = sown_maps(RECALL.model(config), params, jnp.asarray(tokens))
    mixer = maps["stack"]["layers_0"]["block_0"]["mixer"]
    given = np.asarray(mixer["propagate"][0][0]).reshape(2, 8, 2, 8, 3)
    for row in range(2):
        expected = np.zeros((2, 64, 64))
        for start, first, second, gamma, *_ in _direct(config, params, tokens[row]):
            signed = first - gamma[:, None, None] * second
            block = np.einsum("ntm,nmr->ntr", given[row, start // 8], signed)
            expected[:, start : start + 8, start - block.shape[-1] : start] = block
        np.testing.assert_allclose(score[row], expected, rtol=2e-3, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(score)[..., :8, :], 0.0)
    found = summary(np.asarray(local), np.asarray(score))
    assert found["local"] == pytest.approx(1.0, rel=1e-5)
    # lambda (1 - gamma) for each token with a history.
    gamma = next(_direct(config, params, tokens[0]))[3]
    assert found["row_sum"] == pytest.approx(0.5 * (1 - gamma.mean()) * 56 / 64, rel=1e-3)


def test_what_lies_before_the_row_is_left_out():
    compressed = jnp.arange(1.0, 5.0).reshape(1, 2, 1, 1, 2)  # two blocks of one token, histories of two
    score = reconstructed_score(jnp.ones((2, 1, 1, 1)), compressed, block=1, length=2)
    np.testing.assert_array_equal(score[0, 0], [[0, 0], [4, 0]])


def _ratio(delta, one, two, gamma):
    """Equation 18 as printed."""
    e = math.exp
    up = e(delta) / (e(delta) + 1) - gamma * e(one) / (e(one) + e(two))
    return up / (1 / (e(delta) + 1) - gamma * e(two) / (e(one) + e(two)))


@pytest.mark.parametrize(
    ("delta", "one", "two", "gamma"), [(2.0, 0.5, 0.3, 0.2), (1.0, 0.0, 2.0, 0.4), (1.0, 3.0, 0.0, 0.5)]
)
def test_two_keys_give_equations_17_and_18(delta, one, two, gamma):
    first = np.exp([delta, 0.0]) / np.exp([delta, 0.0]).sum()
    second = np.exp([one, two]) / np.exp([one, two]).sum()
    shaped = (first[None, None, None, None], (first - gamma * second)[None, None, None, None])
    marks = np.asarray([[[True, False]]]), np.asarray([[[False, True]]])
    found, change = compare(*shaped, *marks)
    expected = _ratio(delta, one, two, gamma)
    assert found["first"] == pytest.approx(math.exp(delta))
    assert found["differential"] == (pytest.approx(expected) if expected > 0 else None)
    assert found["undefined"] == float(expected <= 0)
    assert found["condition"] == float(one - two <= delta)
    assert found["gamma"] == pytest.approx([gamma, gamma])
    if expected > 0:
        assert change == pytest.approx([expected / math.exp(delta)])
        assert found["proposition"] == (float(expected >= math.exp(delta)) if found["condition"] else None)


def test_the_histogram_has_every_ratio():
    """Ratios beyond the ends go into the first and last bars."""
    change = np.array([-3.0, 2.0**-9, 1.1, 2.0**8, 2.0**9, 2.0**100])
    shown = Measured({}, [("run", change, {"undefined": 0, "raised": 0})])
    heights = [bar.get_height() for bar in draw([shown]).axes[0].patches]
    assert sum(heights) == 6
    assert (heights[0], heights[-1]) == (2, 3)


@pytest.mark.parametrize("preset", ["brl", "induction"])
def test_relevant_tokens_are_the_records(preset):
    config = PRESETS[preset].data
    case = config.cases[-1]
    rows = draw_rows(config, case, (0,), 5)
    found = relevant_tokens(config.kind, rows["tokens"], rows["places"], rows["targets"])
    assert (found.sum(1) <= 2 * case.pairs).all()
    assert (found.sum(1) > 1).all()
    if preset == "brl":
        np.testing.assert_array_equal(found, np.arange(case.length)[None] < np.full((5, 1), 2 * case.pairs))


def test_relevant_tokens_are_the_records_before_the_first_question():
    # A question (5 at position 4) followed by its answer, and another (6) for which only the record's key recurs.
    row = np.array([[5, 9, 6, 8, 5, 9, 6, 7]])
    found = relevant_tokens("mqar", row, np.array([[4, 6]]), np.array([[9, 8]]))
    np.testing.assert_array_equal(found[0], [True, True, True, True, False, False, False, False])


def test_relevant_tokens_of_a_copy_are_its_symbols():
    row = np.array([[0, 5, 0, 4, 5, 0, 1, 5, 4]])
    found = relevant_tokens("copy", row, np.array([[6, 7, 8]]), np.array([[5, 4, 5]]))
    np.testing.assert_array_equal(found[0], [False, True, False, True, True, False, False, False, False])


def test_rows_with_the_most_records_are_read(run):
    """Reads only the rows with 4 records when rows with 1, 2 and 4 alternate, and no more rows than exist."""
    _, config, params = run
    data = dataclasses.replace(config.data, length=(config.data.length[0],), pairs=(1, 4, 2), valid_rows=3)
    some = Run(RECALL, dataclasses.replace(config, data=data), None, params, 1)
    assert first_rows(some, "valid", 2)["places"].shape == (2, 4)
    assert first_rows(some, "valid", 50)["places"].shape == (3, 4)


@pytest.mark.slow
def test_commands(run, tmp_path, capsys):
    folder, config, _ = run
    picture = tmp_path / "maps.png"
    eval.studies.regularizer.main(["--workdir", str(folder), "--sequences", "2", "--picture", str(picture)])
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert layer["beyond_window"] > 0.1
    assert picture.stat().st_size > 10_000
    picture = tmp_path / "ratios.png"
    eval.studies.signal_to_noise.main(
        ["--workdir", str(folder), "--sequences", "3", "--picture", str(picture)]
    )
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    gamma = np.exp([0.4, -0.6]) - np.exp([0.1, 0.3])
    np.testing.assert_allclose(layer["gamma"], sorted(gamma), rtol=1e-3)
    # For each row, head and compressed token.
    assert layer["weights"] == 3 * 2 * 3 * _mixed_blocks(config)
    assert picture.stat().st_size > 5_000
    eval.studies.signal_to_noise.main(["--workdir", str(folder), "--sequences", "1000"])
    assert json.loads(capsys.readouterr().out)["sequences"] == config.data.valid_rows  # and no row twice


def _mixed_blocks(config):
    """Blocks of 8 tokens whose history of 12 has both records (in a row's first 8 tokens) and other tokens."""
    return sum(max(0, start - 12) < 8 < start for start in range(0, 64, 8))
