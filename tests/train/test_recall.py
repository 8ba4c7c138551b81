"""Recall: rows checked against their definition, the objective, and the commands as a user runs them."""

import dataclasses
import json

import flax.linen as nn
import jax
import numpy as np
import pytest

import eval.tasks.recall
import train.recall
from eval.harness.groups import by_network
from eval.tasks.recall import draw, frontier, kibibytes
from tests.support.command_lines import config_of, last_wins
from tests.support.logs import metrics_lines
from train.data.drawn import DrawnBatches, HeldOutDrawn
from train.data.recall import Case, RecallDataConfig, blind_accuracy, draw_rows, num_answers
from train.engine.errors import UserError
from train.tasks.recall import PRESETS, RECALL, answer_logits, recall_objective

TINY = (
    "--length 24 --pairs 3 --gap 4 --vocabulary 12 --valid_rows 10 --test_rows 12 --num_layers 1 --d_model 16 "
    "--num_heads 2 --d_ff 16 --batch 8 --warmup_steps 2 --tensorboard False"
)
CASES = [
    # kind, vocabulary, length, pairs, gap: the shortest rows, odd ones, few tokens, many.
    ("mqar", 8, 15, 4, 0),
    ("mqar", 8192, 67, 5, 16),
    ("mqar", 9, 41, 4, 7),
    ("induction", 3, 3, 1, 0),
    ("induction", 40, 64, 6, 21),
    ("copy", 4, 8, 4, 0),
    ("copy", 18, 65, 9, 30),
]


def data_of(kind, vocabulary, length, pairs, gap):
    return RecallDataConfig(kind=kind, vocabulary=vocabulary, length=(length,), pairs=(pairs,), gap=gap)


def answer_mqar(row, place, config, case):
    table = {row[2 * i]: (row[2 * i + 1], 2 * i + 1) for i in range(case.pairs)}
    assert len(table) == case.pairs
    value, said = table[row[place]]
    assert row[place] < config.vocabulary // 2 <= value
    return value, said


def answer_induction(row, place, config, case):
    before = [i for i in range(place) if row[i] == row[place]]
    assert len(before) == 1
    assert row[place] < case.pairs
    return row[before[0] + 1], before[0] + 1


def answer_copy(row, place, config, case):
    separator = row.index(1)
    assert separator == case.length - case.pairs
    places = [i for i in range(separator) if row[i] != 0]
    assert len(places) == case.pairs
    number = place - separator
    assert row[separator + 1 :] == [row[i] for i in places[:-1]]
    return row[places[number]], places[number]


@pytest.mark.parametrize("sizes", CASES, ids=lambda sizes: "-".join(map(str, sizes)))
def test_rows_follow_their_definition(sizes):
    """Each answer is what a token-by-token reading of the row finds, and every record keeps its gap to the question."""
    config = data_of(*sizes)
    case = config.cases[0]
    reader = {"mqar": answer_mqar, "induction": answer_induction, "copy": answer_copy}[config.kind]
    batch = draw_rows(config, case, (0, 1), 50)
    assert batch["tokens"].shape == (50, case.length)
    assert batch["tokens"].min() >= 0
    assert batch["tokens"].max() < config.vocabulary
    asked = set()
    for row, places, targets in zip(*(batch[name].tolist() for name in ("tokens", "places", "targets"))):
        assert sorted(set(places)) == places
        last_record = -1
        for place, target in zip(places, targets):
            answer, said = reader(row, place, config, case)
            assert answer == target
            last_record = max(last_record, said)
            assert said < place
        assert places[0] - last_record > config.gap
        if config.kind == "mqar":
            keys = row[0 : 2 * case.pairs : 2]
            # Every key is asked for once and occurs nowhere else.
            assert sorted(row[place] for place in places) == sorted(keys)
            assert sum(token in keys for token in row) == 2 * case.pairs
        asked.update(places)
    np.testing.assert_array_equal(batch["weights"], 1)
    if config.kind == "mqar" and case.length > 60:
        assert len(asked) > case.pairs  # the positions differ between rows


def test_questions_stand_where_zoology_puts_them():
    """How often each position after the pairs has a question, drawn by the power law without replacement."""
    config = data_of("mqar", 64, 16, 2, 0)
    places = draw_rows(config, config.cases[0], (3,), 20_000)["places"]
    weight = np.arange(1, 7) ** (0.01 - 1)
    share = weight / weight.sum()
    first = [
        share[i] + sum(share[j] * share[i] / (1 - share[j]) for j in range(6) if j != i) for i in range(6)
    ]
    counted = [np.mean(np.any(places == 4 + 2 * i, axis=1)) for i in range(6)]
    np.testing.assert_allclose(counted, first, atol=0.015)


@pytest.mark.parametrize("kind", ["mqar", "induction", "copy"])
def test_answers_are_uniform(kind):
    """Without the records, no guesser beats 1 / num_answers."""
    config = data_of(kind, 12, 24, 3, 4)
    targets = draw_rows(config, config.cases[0], (3,), 6000)["targets"]
    values, counts = np.unique(targets, return_counts=True)
    assert len(values) == num_answers(config, 3)
    np.testing.assert_allclose(counts / targets.size, 1 / num_answers(config, 3), rtol=0.08)


def test_batches_and_splits_are_all_different():
    config = dataclasses.replace(data_of("mqar", 64, 20, 2, 0), length=(20, 30), pairs=(2, 4), valid_rows=4)

    def take(seed, count):
        return [b for b, _ in zip(DrawnBatches(config, batch=4, seed=seed), range(count))]

    batches = take(0, 4)
    assert [batch["tokens"].shape for batch in batches] == [(4, 20), (4, 30), (4, 20), (4, 30)]

    def rows_of(batches):
        return {tuple(row) for b in batches for row, w in zip(b["tokens"], b["weights"]) if w.all()}

    held_out = {split: rows_of(HeldOutDrawn(config, batch=4, split=split)) for split in ("valid", "test")}
    assert held_out["valid"] == rows_of(HeldOutDrawn(config, batch=3))  # whatever the batch
    assert (len(held_out["valid"]), len(held_out["test"])) == (8, 1024)
    trained = rows_of(batches + take(1, 4))
    assert len(trained) == 32
    assert not trained & held_out["valid"]
    assert not trained & held_out["test"]
    assert not held_out["valid"] & held_out["test"]


def tiny_model(more=""):
    config = RECALL.sized(config_of(RECALL, last_wins(f"{TINY} {more}"), "full"))
    return config, RECALL.build(config)


def test_only_answers_count_in_the_loss():
    config, model = tiny_model()
    batch = draw_rows(config.data, config.data.cases[0], (0,), 4)
    batch["weights"][1] = 0.0

    @jax.jit
    def compute(batch):
        params = nn.unbox(recall_objective(model).init(jax.random.key(0)))
        loss = recall_objective(model).loss(params, None, batch, None)
        every = model.apply({"params": params}, batch["tokens"])[0]
        return loss, every, answer_logits(model, params, batch, None)

    (total, weight, _, averages), logits, before = compute(batch)
    logits = np.asarray(logits, np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    counted = [0, 2, 3]
    expected = right = 0.0
    for row in counted:
        for place, target in zip(batch["places"][row], batch["targets"][row]):
            expected -= logs[row, place, target]
            right += logs[row, place].argmax() == target
    assert float(weight) == 9
    assert float(averages["accuracy"]) == right
    np.testing.assert_allclose(float(total), expected, rtol=1e-5)
    # Only tokens before the last question affect its answer.
    later, earlier = (dict(batch, tokens=batch["tokens"].copy()) for _ in range(2))
    last = batch["places"][0, -1]
    later["tokens"][0, last + 1 :] = 0
    earlier["tokens"][0, 1] += 1
    np.testing.assert_array_equal(before, compute(later)[2])
    assert np.abs(before[0] - compute(earlier)[2][0]).min(axis=-1).max() > 0


def run(workdir, more=""):
    train.recall.main(
        last_wins(f"full --workdir {workdir} {TINY} --steps 6 --eval_every 3 --checkpoint_every 2 {more}")
    )


def test_hybrids_in_the_table():
    """Their rows show both names, and the curve shows the best accuracy for each number of bytes."""

    def result(late, size, accuracy, seed=0):
        settings = {"model.mechanism.name": "gla", "optimizer.learning_rate": 0.1}
        more = {"model.late_mechanism.name": late, "model.schedule": "alternate"}
        case = {"length": 64, "pairs": 8, "state_bytes": size, "accuracy": accuracy}
        return {
            "configuration": settings | (more if late else {}),
            "cases": [case],
            "trained": [[64, 8]],
            "seed": seed,
        }

    runs = [
        result(None, 10, 0.2),
        result("full", 30, 0.9),
        result("full", 30, 0.7, seed=1),
        result("brl", 20, 0.1),
        result("local", 40, 0.85),
    ]
    groups = by_network(runs)
    assert {label: len(each) for label, each in groups.items()} == {
        "gla": 1,
        "gla + full": 2,
        "gla + brl": 1,
        "gla + local": 1,
    }
    curve = frontier(groups.values(), kibibytes)
    assert [1024 * size for size, _ in curve] == [10, 30, 40]
    assert [accuracy for _, accuracy in curve] == pytest.approx([0.2, 0.8, 0.85])


@pytest.mark.slow
def test_measuring_and_the_table(runs, capsys):
    lines = metrics_lines(runs / "run")
    assert [line["step"] for line in lines if "val_accuracy" in line] == [3, 6]
    eval.tasks.recall.main(["--workdir", str(runs / "run"), "--length", "24", "40", "--pairs", "2"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(case["length"], case["pairs"]) for case in result["cases"]] == [(24, 2), (40, 2)]
    assert [case["answers"] for case in result["cases"]] == [24, 24]
    # One layer's keys and values of width 16 in float32; the rest of a cache is a few counters.
    for case in result["cases"]:
        assert 0 <= case["state_bytes"] - 2 * 16 * 4 * case["length"] < 64
    assert not (runs / "run" / "recall_test.json").exists()
    picture = runs / "recall.png"
    eval.tasks.recall.main(["--table", str(runs), "--picture", str(picture)])
    text = capsys.readouterr().out
    assert "| 24/3 | 48/3 | 96/3 |" in text
    assert "| chance | - | - | - | - | - | 16.7 | 16.7 | 16.7 |" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    kept = json.loads((runs / "run" / "recall_test.json").read_text())
    assert kept["learned_at"] is None
    assert kept["cases"][0]["accuracy"] < 0.6  # six steps teach nothing
    with pytest.raises(UserError, match="length must be at least 259 with 64 pairs and gap 4, got 24"):
        eval.tasks.recall.main(["--workdir", str(runs / "run"), "--length", "24", "--pairs", "64"])


@pytest.mark.parametrize("kind", ["mqar", "induction", "copy"])
@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_what_the_answers_of_a_row_alone_are_worth(kind, pairs):
    """Guesses the row's most frequent answer; in "copy", the most frequent one still to come."""
    config = data_of(kind, 18, 64, pairs, 0)
    rows = draw_rows(config, config.cases[0], (5,), 20_000)["targets"]
    possible = blind_accuracy(config, pairs)

    def most_frequent(answers):
        return (answers[:, :, None] == answers[:, None]).sum(axis=1).max(axis=1).mean() / answers.shape[1]

    counted = [most_frequent(rows[:, first:]) for first in range(pairs if kind == "copy" else 1)]
    assert possible == pytest.approx(np.mean(counted), abs=0.005)
    if pairs == 2:
        values = num_answers(config, 2)
        exact = (values + 1) / (2 * values)
        assert possible == pytest.approx((exact + 1) / 2 if kind == "copy" else exact)


def test_many_answers_of_many_are_hardly_ever_alike():
    config = data_of("mqar", 8192, 1024, 64, 0)
    assert 1 / 64 < blind_accuracy(config, 64) < 1.5 / 64


def test_state_and_cases():
    """A window's state is the same at any length; full attention's grows."""
    _, full = tiny_model()
    _, local = tiny_model("--mechanism local --mechanism.window 8")
    assert eval.tasks.recall.state_bytes(full, 400) > 9 * eval.tasks.recall.state_bytes(full, 40)
    assert eval.tasks.recall.state_bytes(local, 400) == eval.tasks.recall.state_bytes(local, 40)
    assert RecallDataConfig(length=(64,), pairs=(1, 2)).cases == (Case(64, 1), Case(64, 2))
    # By default, rows that a network cannot read are not measured.
    _, short = tiny_model("--mechanism synthesizer --mechanism.max_length 48")
    assert eval.tasks.recall._refusal(short, 48) is None
    assert "max_length" in eval.tasks.recall._refusal(short, 96)
    data = RecallDataConfig(length=(32, 64), pairs=(2, 8))
    assert eval.tasks.recall.chosen_cases(data, (), ()) == (
        Case(32, 2), Case(64, 8), Case(128, 2), Case(128, 8), Case(256, 2), Case(256, 8)
    )  # fmt: skip
    assert eval.tasks.recall.chosen_cases(data, (), (4,)) == (Case(32, 4), Case(64, 4))
    # A combination without rows is left out; a value without any rows is an error.
    assert eval.tasks.recall.chosen_cases(data, (16, 64), (2, 12)) == (Case(16, 2), Case(64, 2), Case(64, 12))
    with pytest.raises(UserError, match="--pairs must be at least 1, got 0"):
        eval.tasks.recall.chosen_cases(data, (), (0, 4))
    with pytest.raises(UserError, match="--length must be at least 7 with 2 pairs and gap 0, got -5"):
        eval.tasks.recall.chosen_cases(data, (64, -5), ())


def test_gaps_exceed_what_windows_reach():
    for name, config in PRESETS.items():
        reach = config.model.num_layers * (PRESETS["local"].model.mechanism.window - 1)
        assert config.data.gap >= reach or name.startswith("zoology")


def test_runs_of_two_kinds_have_no_picture():
    """Guessing scores differently on the two kinds."""
    runs = [
        {"configuration": {"model.mechanism.name": "full", "data.kind": kind}} for kind in ("mqar", "copy")
    ]
    with pytest.raises(UserError, match="--picture: expected runs of one kind of rows, got copy, mqar"):
        draw(runs)
