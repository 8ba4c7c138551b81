"""eval.gradient_bounds: gradients with respect to scores, and both sides of their bounds, against float64 complex
steps."""

import json
import math
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eval.studies.gradient_bounds
import train.lm
from brl_jax.layers import FullConfig, LinearConfig, LocalConfig, NormConfig
from brl_jax.models import DecoderConfig, DecoderLM
from eval.studies.gradient_bounds import (
    BoundOptions,
    _explicit,
    kind_of,
    layer_gradients,
    main,
    measure_run,
    summary,
)
from tests.oracles.parts import FEATURES, feed_forward, layers, norm, project, softmax
from tests.support.parameters import drawn
from train.engine.errors import UserError

LENGTH, WIDTH, HEADS, VOCABULARY = 5, 8, 2, 11
SEEN = np.tril(np.ones((LENGTH, LENGTH), bool))
STEP, EPSILON = 1e-30, DecoderConfig().norm_epsilon


def _mix(kind, u, p, change):
    """One layer's output; `change` is added to its scores (N, T, T) and its outputs (T, N, V)."""
    q, k, v = (project(u, p[name]).swapaxes(0, 1) for name in ("query", "key", "value"))
    if kind == "softmax":
        scores = q @ k.swapaxes(1, 2) / math.sqrt(WIDTH // HEADS)
    else:
        scores = FEATURES["elu+1"](q) @ FEATURES["elu+1"](k).swapaxes(1, 2)
    scores = scores + change[0]
    if kind == "softmax":
        weights = softmax(scores, SEEN)
    else:
        scores = weights = scores * SEEN
        if kind == "linear":
            weights = scores / scores.sum(-1, keepdims=True)
    out = (weights @ v).swapaxes(0, 1)
    if kind == "norm":
        out = out / np.sqrt((out * out).mean((1, 2), keepdims=True) + EPSILON)
    out = out + change[1]
    scaled = out * p["norm_scale"] if kind == "norm" else out
    return np.tensordot(scaled, p["out"]["kernel"], axes=2), weights, scores, v


def _loss(kind, params, d, tokens, targets, changes):
    """The mean loss of a row, and each layer's weights, scores and values."""
    x = params["embedding"][tokens] * math.sqrt(WIDTH)
    seen = []
    for p, change in zip(layers(params["stack"]), changes):
        mixed, *parts = _mix(kind, norm(x, p["mixer_norm"], d.norm), p["mixer"], change)
        seen.append(parts)
        x = x + mixed
        x = x + feed_forward(norm(x, p["feed_forward_norm"], d.norm), p["feed_forward"])
    logits = norm(x, params["stack"]["final_norm"], d.norm) @ params["embedding"].T
    chosen = logits[np.arange(LENGTH), targets]
    return (np.log(np.exp(logits).sum(-1)) - chosen).mean(), seen


def _complex_steps(kind, params, d, tokens, targets):
    """dL / ds and dL / dO of each layer."""
    shapes = ((HEADS, LENGTH, LENGTH), (LENGTH, HEADS, WIDTH // HEADS))
    gradients = [[np.zeros(shape) for shape in shapes] for _ in range(2)]
    for layer, which in np.ndindex(2, 2):
        for place in np.ndindex(shapes[which]):
            changes = [[np.zeros(shape, complex) for shape in shapes] for _ in range(2)]
            changes[layer][which][place] = 1j * STEP
            gradients[layer][which][place] = _loss(kind, params, d, tokens, targets, changes)[0].imag / STEP
    return gradients


@pytest.mark.parametrize(
    ("kind", "mechanism"),
    [
        ("softmax", FullConfig()),
        pytest.param("linear", LinearConfig(chunk_size=4), marks=pytest.mark.slow),
        pytest.param("norm", NormConfig(chunk_size=4), marks=pytest.mark.slow),
    ],
)
def test_gradients_and_both_sides_of_the_bounds(kind, mechanism):
    config = DecoderConfig(
        num_layers=2, d_model=WIDTH, num_heads=HEADS, d_ff=8, vocab_size=VOCABULARY, mechanism=mechanism,
        rope_theta=None,
    )  # fmt: skip
    assert kind_of(mechanism, config.dimensions) == kind
    model = DecoderLM(config)
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, VOCABULARY, (2, 2, LENGTH)).astype(np.int32)
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.asarray(tokens)))["params"]
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.6, leaf.shape).astype(np.float32), shapes)
    found = layer_gradients(model, params, tokens, targets)
    exact = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
    assert sorted(found) == [0, 1]
    for layer, (got,) in found.items():
        rows = []
        for row in range(2):
            arguments = (kind, exact, config.dimensions, tokens[row], targets[row])
            by_score, by_output = _complex_steps(*arguments)[layer]
            weights, scores, value = _loss(*arguments, np.zeros((2, 2, 1, 1, 1)))[1][layer]
            close = {"rtol": 2e-3, "atol": 1e-5}
            np.testing.assert_allclose(got.by_score[row], by_score, **close)
            np.testing.assert_allclose(got.by_output[row], by_output, **close)
            np.testing.assert_allclose(got.weights[row], weights, **close)
            # c_1, over all heads if they are normalized together, and c_2.
            axes = (1, 2) if kind == "norm" else 2
            c1 = np.broadcast_to(np.sqrt((by_output**2).sum(axes)).max(0), HEADS)
            c2 = np.sqrt((value**2).sum(-1)).max(1)
            rows.append((by_score, scores, weights, c1 * c2))
        _check_summary(kind, got, rows)


def _check_summary(kind, got, rows):
    measures, sizes = summary(kind, got, EPSILON)
    largest, share, bounds, relative, entries, entry_shares, every = [], [], [], [], [], [], []
    for (by_score, scores, weights, unit), head in ((row, head) for row in rows for head in range(HEADS)):
        pairs = [(i, j) for i in range(LENGTH) for j in range(i + 1)]
        of_pairs = np.array([abs(by_score[head][pair]) for pair in pairs]) / unit[head]
        of_scores = np.array([abs(scores[head][pair]) for pair in pairs])
        bound = {
            "softmax": math.sqrt(LENGTH) / 4,
            "linear": math.sqrt(LENGTH) / (4 * of_scores.min()),
            "norm": 3 * WIDTH / (2 * math.sqrt(EPSILON)),
        }[kind]
        every.extend(of_pairs)
        largest.append(of_pairs.max())
        bounds.append(bound)
        share.append(of_pairs.max() / bound)
        relative.append((of_pairs * (1 if kind == "softmax" else of_scores)).max())
        # Equations 7, 9 and 11 literally, for every i, j and k.
        for i in range(LENGTH):
            p, s = weights[head][i][: i + 1], scores[head][i][: i + 1]
            factor = np.ones(i + 1) if kind == "softmax" else 1 / s
            slopes = factor * (np.diag(p) - np.outer(p, p))
            entries.append(np.abs(slopes).max())
            entry_shares.append((4 * np.abs(slopes) / factor).max())
    expected = {
        "largest": max(largest), "median": np.median(every), "bound": min(bounds), "share_of_bound": max(share),
        "relative": max(relative),
    }  # fmt: skip
    if kind != "norm":
        expected |= {"entry": max(entries), "entry_share": max(entry_shares)}
    else:
        assert measures["entry"] is measures["entry_share"] is None
        assert measures["share_of_bound"] < measures["share_of_row_bound"] <= 1
    for name, value in expected.items():
        assert measures[name] == pytest.approx(value, rel=5e-3), name
    np.testing.assert_allclose(np.sort(sizes), np.sort(every), rtol=5e-3, atol=1e-5)


@pytest.mark.slow
def test_norm_attention_follows_norm_epsilon():
    """The measured gradients are the trained network's, and the bound uses its epsilon."""
    epsilon = 0.5
    model = DecoderLM(
        DecoderConfig(
            num_layers=1, d_model=WIDTH, num_heads=HEADS, d_ff=8, vocab_size=VOCABULARY, mechanism=NormConfig(),
            norm_epsilon=epsilon,
        )
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH)).astype(np.int32)
    params = drawn(model.init, tokens)["params"]
    expected, _ = model.apply({"params": params}, tokens)
    with nn.intercept_methods(_explicit):
        (got, _), _ = model.apply({"params": params}, tokens, mutable=["intermediates"])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    (found,) = layer_gradients(model, params, tokens, tokens)[0]
    measures, _ = summary("norm", found, epsilon)
    assert measures["bound"] == pytest.approx(1.5 * WIDTH / math.sqrt(epsilon))


@pytest.mark.slow
def test_each_of_two_mechanisms_that_share_a_layer(monkeypatch):
    config = DecoderConfig(
        num_layers=2, d_model=WIDTH, num_heads=HEADS, d_ff=8, vocab_size=VOCABULARY, mechanism=NormConfig(),
        late_mechanism=LocalConfig(window=3), schedule="parallel",
    )  # fmt: skip
    model = DecoderLM(config)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH)).astype(np.int32)
    params = drawn(model.init, tokens)["params"]
    run = types.SimpleNamespace(
        config=types.SimpleNamespace(model=config), model=model, params=params, step=1
    )
    monkeypatch.setattr(eval.studies.gradient_bounds, "open_run", lambda *_: run)
    monkeypatch.setattr(
        eval.studies.gradient_bounds, "first_rows", lambda *_: {"tokens": tokens, "targets": tokens[:, ::-1]}
    )
    result = measure_run(BoundOptions(), "run").result
    found = [(layer["layer"], layer["kind"]) for layer in result["layers"]]
    assert found == [(0, "norm"), (0, "softmax"), (1, "norm"), (1, "softmax")]
    assert all(0 < layer["share_of_bound"] < 1 for layer in result["layers"])


@pytest.mark.slow
def test_command(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a word follows another word and so on\n" * 20)
    small = (
        f"--data text:{tmp_path}/text.txt --steps 2 --batch 2 --length 16 --num_layers 2 --d_model 16 --num_heads 2 "
        "--d_ff 16 --eval_tokens 64 --warmup_steps 1 --sample_tokens 0 --tensorboard False --rope_theta None "
        "--tokenizer bytes"
    )
    folders = []
    for name, options in {
        "t2": "--mechanism local --mechanism.window 4 --late_mechanism norm",
        "linear": "--mechanism linear",
        "other": "--mechanism deltanet",
    }.items():
        folders.append(str(tmp_path / name))
        train.lm.main(["--workdir", folders[-1], *small.split(), *options.split()])
    capsys.readouterr()
    picture = tmp_path / "bounds.png"
    argv = ["--sequences", "2", "--length", "12", "--picture", str(picture)]
    main(["--workdir", *folders[:2], *argv])
    t2, linear = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [layer["kind"] for layer in t2["layers"]] == ["softmax", "norm"]
    assert [layer["kind"] for layer in linear["layers"]] == ["linear", "linear"]
    assert (t2["length"], t2["sequences"]) == (12, 2)
    for layer in (*t2["layers"], *linear["layers"]):
        assert 0 < layer["share_of_bound"] < 1
    assert picture.stat().st_size > 10_000
    with pytest.raises(
        UserError, match="has no layer of softmax attention, of linear attention without rotary"
    ):
        main(["--workdir", folders[2]])


@pytest.mark.parametrize(
    ("mechanism", "rope_theta", "kind"),
    [
        (LinearConfig(), 10000.0, None),
        (LinearConfig(normalize=False), None, None),
        (NormConfig(), 10000.0, "norm"),
        (NormConfig(norm="layer"), None, None),
        (LocalConfig(window=3, sinks=True), None, None),
        (LocalConfig(window=3), 10000.0, "softmax"),
    ],
)
def test_which_layers_have_bounds(mechanism, rope_theta, kind):
    config = DecoderConfig(mechanism=mechanism, rope_theta=rope_theta)
    assert kind_of(mechanism, config.dimensions) == kind
