"""Classifier heads initialized with a linear map of the encoder's output."""

import jax
import numpy as np
import pytest

import train.lra
from brl_jax.models import Classifier, EncoderConfig, PairClassifier
from eval.harness.runs import open_run
from tests.support.command_lines import config_of, last_wins
from tests.support.logs import metrics_lines
from tests.support.parameters import drawn
from tests.support.runs import untrained
from train.engine.errors import UserError
from train.tasks.lra import LRA
from train.tasks.lra_head import fitted, fitted_head


def test_a_linear_map_reads_what_is_linear_whatever_its_scale():
    rng = np.random.default_rng(0)
    features = rng.standard_normal((600, 5)) * [1e-4, 1.0, 1.0, 50.0, 1.0] + 7.0
    labels = (features[:, 0] > 7.0).astype(int)
    found = fitted(features[:400], labels[:400], 2)(features[400:]).argmax(-1)
    assert (found == labels[400:]).mean() > 0.9
    # Nonlinear functions cannot be read out.
    parity = ((features[:, 1] > 7.0) ^ (features[:, 2] > 7.0)).astype(int)
    found = fitted(features[:400], parity[:400], 2)(features[400:]).argmax(-1)
    assert (found == parity[400:]).mean() < 0.65


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "pooling"),
    [(Classifier, "mean"), (Classifier, "max"), (Classifier, "cls"), (PairClassifier, "mean")],
)
def test_the_classifier_gives_the_scores_of_the_map(kind, pooling):
    """Holds for ragged rows outside the fit too. How often one token occurs, in a pair's second sequence, decides the
    label; the pooled outputs barely show it."""
    rng = np.random.default_rng(1)
    config = EncoderConfig(
        num_layers=1, d_model=12, num_heads=2, d_ff=10, vocab_size=8, num_classes=3, pooling=pooling
    )
    model = kind(config)
    tokens = rng.integers(1, 8, (200, 2, 10)).astype(np.int32)
    lengths = rng.integers(4, 11, (200, 2)).astype(np.int32)
    labels = np.minimum((tokens[:, 1] == 3).sum(1), 2)
    if kind is Classifier:
        tokens, lengths = tokens[:, 1], lengths[:, 1]
    params = drawn(model.init, tokens[:2])["params"]
    batch = {"tokens": tokens, "lengths": lengths, "targets": labels, "weights": np.ones(200, np.float32)}
    batch["weights"][150:] = 0.0
    head = fitted_head(model, params, [batch])

    sequences = tokens.reshape(-1, 10), lengths.reshape(-1)
    encode = jax.jit(lambda p: model.apply(p, *sequences, method=lambda m, x, n: m.encoder(x, lengths=n)))
    features = np.asarray(encode({"params": params}), np.float64)
    if kind is PairClassifier:
        a, b = features[0::2], features[1::2]
        features = np.concatenate([a, b, a * b, a - b], axis=-1)
    linear = fitted(features[:150], labels[:150], 3)
    logits = np.asarray(
        jax.jit(model.apply)({"params": {**params, "head": head}}, tokens, lengths=lengths), np.float64
    )
    factors = logits / linear(features)
    np.testing.assert_allclose(factors, np.median(factors), rtol=2e-2)
    assert np.log2(np.median(factors)) == pytest.approx(round(np.log2(np.median(factors))), abs=1e-3)
    # The chosen factor is the one that fits the examples best.
    losses = [
        -np.mean(np.log(np.exp(y)[np.arange(150), labels[:150]] / np.exp(y).sum(-1)))
        for y in (logits[:150], logits[:150] / 2, logits[:150] * 2)
    ]
    assert losses[0] == min(losses)


def test_a_narrow_hidden_layer_is_named():
    config = EncoderConfig(num_layers=1, d_model=4, num_heads=1, d_ff=5, vocab_size=8, num_classes=3)
    tokens = np.ones((1, 2), np.int32)
    params = drawn(Classifier(config).init, tokens)["params"]
    with pytest.raises(ValueError, match=r"d_ff must be at least 2 x num_classes = 6, got 5"):
        fitted_head(Classifier(config), params, [])


@pytest.mark.slow
def test_a_run_starts_from_the_fitted_head(tmp_path):
    small = (
        "--train_examples 40 --valid_examples 30 --test_examples 8 --processes 1 --num_layers 1 --d_model 8 "
        "--num_heads 2 --d_ff 24 --mechanism local --mechanism.window 4 --length 32 --buckets 32 "
        "--listops.max_tokens 32 --batch 8 --steps 1 --eval_every 1 --checkpoint_every 1 --tensorboard False"
    )
    first, second = tmp_path / "first", tmp_path / "second"
    untrained(LRA, LRA.sized(config_of(LRA, f"--workdir {first} {small}", "listops")))
    more = f"--pretrained {first} --fit_head 40 --learning_rate 1e-12"
    train.lra.main(last_wins(f"listops --workdir {second} {small} {more}"))
    head = open_run([LRA], str(second), "last").params["head"]
    assert set(np.unique(np.round(head["out"]["kernel"], 5))) == {-1.0, 0.0, 1.0}
    assert len(metrics_lines(second)) == 1
    with pytest.raises(UserError, match="fit_head must be at least 0, got -1"):
        train.lra.main(f"listops --workdir {tmp_path / 'other'} {small} --fit_head -1".split())


@pytest.mark.slow
def test_the_head_of_pairs_is_fitted_to_a_random_encoder(tmp_path):
    pairs = [(0, b"aaab", b"abaa"), (1, b"caab", b"abcc")] * 20
    for split in ("train", "eval", "test"):
        lines = [b"%d.0\t1\t2\t%s\t%s\n" % pair for pair in pairs]
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_bytes(b"".join(lines))
    train.lra.main(
        f"retrieval --data_dir {tmp_path} --workdir {tmp_path / 'run'} --num_layers 1 --d_model 8 --num_heads 2 "
        "--d_ff 24 --mechanism local --mechanism.window 4 --length 32 --buckets 32 --batch 8 --steps 1 --eval_every 1 "
        "--checkpoint_every 1 --tensorboard False --fit_head 40 --learning_rate 1e-12".split()
    )
    head = open_run([LRA], str(tmp_path / "run"), "last").params["head"]
    assert set(np.unique(np.round(head["out"]["kernel"], 5))) == {-1.0, 0.0, 1.0}
    accuracies = [line.get("val_accuracy") for line in metrics_lines(tmp_path / "run")]
    assert accuracies[-1] == 1.0
