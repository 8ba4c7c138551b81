"""GLUE: its files, rows of one and two sentences, metrics, the paper's table, and fine-tuning as a user runs it."""

import json

import flax.linen as nn
import jax
import numpy as np
import pytest

import eval.tasks.glue
import train.glue
import train.mlm
from eval.harness.output import Measured
from eval.harness.runs import open_run
from eval.tasks.glue import PAPER, best_rates, markdown, summarise, task_metrics
from tests.support.command_lines import TINY_MLM, config_of, last_wins
from tests.support.logs import metrics_lines
from tests.support.texts import write_lines
from tests.train.buckets import check_read_alike
from train.data.glue import SCORE_STEPS, GlueDataConfig, join_sentences, load_glue
from train.data.tokenizers.named import BytesTokenizer
from train.engine.errors import UserError
from train.tasks.glue import GLUE, scores
from train.tasks.mlm import MLM
from train.tasks.task import read_config

SEPARATOR = 257


def cola(folder, rows=40):
    lines = [f"gj04\t{i % 2}\t\t{'The cat sat' if i % 2 else 'Cat the sat'} {i}." for i in range(rows)]
    write_lines(folder / "CoLA" / "train.tsv.gz", lines)
    write_lines(folder / "CoLA" / "dev.tsv", lines[:12])


def read(folder, task, splits=("train", "valid", "test"), **options):
    config = GlueDataConfig(task=task, data_dir=str(folder), **options)
    return load_glue(config, BytesTokenizer(), SEPARATOR, splits)


def test_a_file_without_a_header_and_every_tenth_row_for_validation(tmp_path):
    cola(tmp_path)
    found = read(tmp_path, "cola")
    assert [len(found[split]) for split in ("train", "valid", "test")] == [36, 4, 12]
    assert bytes(found["valid"][0][0].astype(np.uint8)) == b"The cat sat 9."
    assert found["valid"].labels.tolist() == [1, 1, 1, 1]
    assert bytes(found["test"][0][0].astype(np.uint8)) == b"Cat the sat 0."
    assert len(read(tmp_path / "CoLA", "cola", ("train",), train_examples=5)["train"]) == 5


def test_two_sentences_and_columns_by_name(tmp_path):
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    write_lines(
        tmp_path / "MRPC" / "dev.tsv", [header, '1\t1\t2\tHe said "yes.\tYes, he "said', "0\t3\t4\tA\tB"]
    )
    examples = read(tmp_path, "mrpc", ("test",))["test"]
    assert examples.labels.tolist() == [1, 0]
    assert examples[1][0].tolist() == [ord("A"), SEPARATOR, ord("B")]
    assert bytes(examples[0][0][:13].astype(np.uint8)) == b'He said "yes.'


def test_questions_with_the_gaps_of_the_published_file(tmp_path, capsys):
    """A few lines of QQP's train.tsv lack columns, and a few of its questions are empty."""
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    whole = [f"{i}\t{i}\t{i}\tA{i}\tB{i}\t{i % 2}" for i in range(20)]
    lines = [header, *whole[:3], "3\t3\t3\tWhat is", *whole[3:], "20\t1\t2\tC\t\t1"]
    write_lines(tmp_path / "QQP" / "train.tsv", lines)
    found = read(tmp_path, "qqp", ("train", "valid"))
    assert (len(found["train"]), found["valid"].labels.tolist()) == (19, [1, 1])
    assert bytes(found["valid"][0][0][:2].astype(np.uint8)) == b"A9"
    assert found["train"][18][0].tolist() == [ord("C"), SEPARATOR]
    assert "lines left out, as they lack a sentence or a label: 1" in " ".join(
        capsys.readouterr().err.split()
    )
    write_lines(tmp_path / "QQP" / "train.tsv", [header, "0\t1\t2\tA\tB\t2"])
    with pytest.raises(UserError, match=r"line 2: expected the label 0 or 1, got '2'"):
        read(tmp_path, "qqp", ("train",))


def test_scores_and_two_test_splits(tmp_path):
    write_lines(
        tmp_path / "STS-B" / "dev.tsv", ["index\tsentence1\tsentence2\tscore", "0\ta\tb\t3.25", "1\tc\td\t5"]
    )
    assert read(tmp_path, "stsb", ("test",))["test"].labels.tolist() == [3250, 5 * SCORE_STEPS]
    for split, label in (("matched", "neutral"), ("mismatched", "contradiction")):
        lines = ["index\tsentence1\tsentence2\tgold_label", f"0\ta\tb\t{label}"]
        write_lines(tmp_path / "MNLI" / f"dev_{split}.tsv", lines)
    assert read(tmp_path, "mnli", ("test",))["test"].labels.tolist() == [1]
    assert read(tmp_path, "mnli", ("dev_mismatched",))["dev_mismatched"].labels.tolist() == [2]


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        ((9, 9), (5, 4)),
        ((2, 9), (2, 7)),
        ((9, 2), (7, 2)),
        ((3, 3), (3, 3)),
        ((4, 5), (4, 5)),
        ((20, 4), (5, 4)),
    ],
)
def test_the_longer_sentence_is_cut_first(lengths, kept):
    first, second = np.full(lengths[0], 1), np.full(lengths[1], 2)
    expected = [1] * kept[0] + [0] + [2] * kept[1]
    assert join_sentences([first, second], 10, 0).tolist() == expected


@pytest.mark.parametrize(
    ("task", "lines", "message"),
    [
        ("cola", ["x\t2\t\tA sentence"], r"dev\.tsv, line 1: expected the label 0 or 1, got '2'"),
        ("cola", ["x\t1\t\t "], r"dev\.tsv, line 1: expected a sentence, got an empty one"),
        ("cola", ["x\t1\tA"], r"line 1: expected at least 4 columns, got 3"),
        ("sst2", ["text\tlabel", "good\t1"], r"line 1: expected a column 'sentence', got 'text', 'label'$"),
        ("rte", ["sentence1\tsentence2\tlabel", "a\tb\tyes"], r"line 2: expected the label entailment or not_"),
        ("stsb", ["sentence1\tsentence2\tscore", "a\tb\t7"], r"line 2: expected a score from 0 to 5, got '7'"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path, task, lines, message):
    write_lines(tmp_path / "dev.tsv", lines)
    with pytest.raises(UserError, match=message):
        read(tmp_path, task, ("test",))


def test_missing_files_and_empty_splits(tmp_path):
    with pytest.raises(
        UserError, match=r"--data_dir: expected .*/CoLA/train\.tsv or train\.tsv\.gz; there is neither"
    ):
        read(tmp_path, "cola", ("train",))
    cola(tmp_path, rows=5)
    with pytest.raises(UserError, match="has no valid examples of cola"):
        read(tmp_path, "cola")


@pytest.mark.parametrize(("mechanism", "rows"), [("cosformer", 24), ("mlr", 24), ("mlr", 64)])
def test_a_sentence_is_read_alike_in_every_bucket(tmp_path, mechanism, rows):
    """Includes mechanisms whose settings follow the row length: they keep the settings of pretraining."""
    line = f"mlm-full --mechanism {mechanism} --length {rows} --tokenizer bytes --d_model 16 --num_heads 2 --d_ff 16"
    pretraining = MLM.sized(config_of(MLM, line))
    (tmp_path / "config.json").write_text(json.dumps(MLM.to_json(pretraining)))
    config = GLUE.sized(config_of(GLUE, f"cola --length 32 --pretrained {tmp_path}"))
    check_read_alike(GLUE.model(config), (8, 16, 32))


def test_metrics_are_the_tasks_own():
    predicted, true = np.array([1, 1, 0, 0, 1, 0]), np.array([1, 0, 0, 1, 1, 0])
    assert task_metrics("sst2", predicted, true) == {"accuracy": pytest.approx(100 * 4 / 6)}
    assert task_metrics("mrpc", predicted, true)["f1"] == pytest.approx(100 * 2 / 3)
    assert task_metrics("cola", predicted, true) == {"matthews": pytest.approx(100 / 3)}
    assert task_metrics("cola", np.zeros(6), true) == {"matthews": 0.0}
    measured = task_metrics("stsb", np.array([0.0, 1.0, 4.0]), np.array([1.0, 2.0, 3.0]))
    assert measured["spearman"] == pytest.approx(100.0)
    assert 90 < measured["pearson"] < 100
    assert task_metrics("stsb", np.ones(3), np.arange(3.0)) == {"pearson": 0.0, "spearman": 0.0}


@pytest.mark.parametrize(
    ("task", "targets", "expected"),
    [("cola", [1, 1, 0, 0], [[0, 1], [1, 1]]), ("stsb", [1500, 2500, 0, 0], [[2.5, 5.0], [1.5, 2.5]])],
)
def test_rows_without_weight_are_not_predicted(task, targets, expected, monkeypatch):
    """A split's last batch is filled up with such rows."""
    batch = {
        "tokens": np.zeros((4, 2), np.int32),
        "lengths": np.ones(4, np.int32),
        "targets": np.array(targets),
        "weights": np.array([1, 1, 0, 0], np.float32),
    }

    class Model:
        def apply(self, variables, tokens, *, lengths):
            return variables["params"]

    monkeypatch.setattr(type(GLUE), "held_out", lambda *_: [batch])
    logits = np.array([[0.0, 0.0], [0.0, 50.0], [9.0, 0.0], [0.0, 9.0]], np.float32)
    found = GLUE.predict(GLUE.presets[task], Model(), logits, None, "valid")
    np.testing.assert_allclose(found, expected)


def test_a_score_is_five_times_the_second_probability():
    np.testing.assert_allclose(scores(np.array([[0.0, 0.0], [0.0, 50.0], [np.log(4.0), 0.0]])), [2.5, 5, 1])


def test_averages_of_the_paper():
    """Table 5's average counts both splits of MNLI, and counts a network that did not converge as 0."""
    for *figures, average, _ in PAPER.values():
        assert np.mean([figure or 0.0 for figure in figures]) == pytest.approx(average, abs=0.011)


def test_runs_that_differ_in_the_seed_are_averaged():
    base = {"task": "mrpc", "metrics": ["f1"], "model": "full", "pretrained": True}
    results = [{**base, "f1": value} for value in (70.0, 80.0)] + [{**base, "f1": 60.0, "pretrained": False}]
    rows = summarise(results)
    assert rows["full, pretrained"]["mrpc f1"] == (75.0, pytest.approx(5.0), 2)
    assert rows["full, from scratch"]["mrpc f1"] == (60.0, 0.0, 1)
    assert "| full, pretrained | 75.00 ± 5.00 (2) |" in markdown(results)
    assert "| full, from scratch | 60.00 (1) |" in markdown(results)


def test_the_best_of_several_learning_rates_is_kept():
    def measured(rate, value, **more):
        configuration = {"optimizer.learning_rate": rate, "model.num_layers": 2, **more}
        facts = {"task": "cola", "metrics": ["matthews"], "matthews": value}
        return Measured({**facts, "configuration": configuration, "learning_rate": rate})

    runs = [measured(1e-5, 40.0), measured(1e-5, 10.0), measured(1e-4, 30.0), measured(1e-4, 24.0)]
    other = measured(1e-5, 5.0, **{"model.num_layers": 3})
    assert best_rates([*runs, other]) == [*runs[2:], other]


def run(workdir, pretrained, data, more=""):
    train.glue.main(
        last_wins(
            f"cola --workdir {workdir} --pretrained {pretrained} --data_dir {data} --steps 6 --eval_every 3 "
            f"--checkpoint_every 2 --batch 8 --length 24 --tensorboard False {more}"
        )
    )


def assert_starts_from(mlm, workdir):
    """Every array of the encoder is bitwise the masked language model's; the classifier's own arrays are new."""
    config = read_config([GLUE], workdir / "config.json")[1]
    objective = GLUE.objective(GLUE.model(config), config)
    fresh = nn.unbox(objective.init(jax.random.key(0)))
    started = objective.start(fresh)
    learnt = open_run([MLM], str(mlm), "best").params
    assert jax.tree.structure(started["encoder"]) == jax.tree.structure(learnt["encoder"])
    jax.tree.map(np.testing.assert_array_equal, started["encoder"], learnt["encoder"])
    assert (started["encoder"]["embedding"] != fresh["encoder"]["embedding"]).any()
    jax.tree.map(np.testing.assert_array_equal, started["head"], fresh["head"])


@pytest.mark.slow
def test_fine_tuning_as_a_user_runs_it(tmp_path, capsys):
    """Starts from the masked language model's weights, and is compared with a fresh start."""
    cola(tmp_path)
    mlm = tmp_path / "mlm"
    train.mlm.main(f"--workdir {mlm} {TINY_MLM} --steps 4 --eval_every 4 --checkpoint_every 4".split())
    run(tmp_path / "runs/whole", mlm, tmp_path)
    assert_starts_from(mlm, tmp_path / "runs/whole")
    run(tmp_path / "runs/scratch", mlm, tmp_path, "--from_scratch")
    scratch, whole = (metrics_lines(tmp_path / "runs" / name)[0]["loss"] for name in ("scratch", "whole"))
    assert scratch != whole
    capsys.readouterr()
    eval.tasks.glue.main(["--table", str(tmp_path / "runs"), "--picture", str(tmp_path / "glue.png")])
    text = capsys.readouterr().out
    assert "local, pretrained" in text
    assert "local, from scratch" in text
    eval.tasks.glue.main(["--workdir", str(tmp_path / "runs/whole")])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["examples"] == 12
    with pytest.raises(UserError, match=r"--pretrained: .* is of the task 'glue'; expected mlm"):
        run(tmp_path / "other", tmp_path / "runs/whole", tmp_path)
    with pytest.raises(
        UserError, match=r"--pretrained: expected the folder of a run of train\.mlm, got none"
    ):
        train.glue.main(["cola", "--workdir", str(tmp_path / "other"), "--data_dir", str(tmp_path)])
    assert not (tmp_path / "other").exists()
