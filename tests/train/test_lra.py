"""The Long Range Arena's commands as a user runs them, on tiny sets: training, resuming, early stopping, measuring."""

import json
import math
import re
import shlex
import shutil

import jax
import numpy as np
import pytest

import eval.tasks.lra
import train.lra
from brl_jax.models import EncoderConfig, TokenClassifier
from eval.harness.groups import compared
from eval.harness.output import Measured
from eval.harness.runs import open_run
from eval.tasks.lra import markdown
from eval.tasks.paper_tables.lra import BRL, BRL_ABLATION, NOTES, PAPERS, TRANSNORMER
from tests.support.command_lines import config_of, last_wins
from tests.support.logs import metrics_lines
from tests.support.parameters import drawn
from tests.train.buckets import check_read_alike
from train.engine.errors import UserError
from train.tasks.lra import LRA
from train.tasks.lra_config import PRESETS
from train.tasks.lra_denoise import LRA_DENOISE
from train.tasks.lra_trace import LRA_TRACE, trace_objective

TINY = (
    "--listops.min_tokens 4 --listops.max_tokens 17 --listops.max_depth 3 --listops.max_args 4 --length 16 "
    "--buckets 16 --train_examples 200 --valid_examples 40 --test_examples 60 --processes 1 --num_layers 1 "
    "--d_model 16 --num_heads 2 --d_ff 16 --batch 8 --dropout 0.2 --warmup_steps 2 --tensorboard False"
)
LOCAL = "--mechanism local --mechanism.window 4"


def run(workdir, more=LOCAL, task="listops"):
    train.lra.main(
        last_wins(f"{task} --workdir {workdir} {TINY} --steps 6 --eval_every 3 --checkpoint_every 2 {more}")
    )


@pytest.mark.parametrize("mechanism", ["cosformer", "mlr --mechanism.ranks 4 2 2"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_sequence_is_read_alike_in_every_bucket(mechanism, pooling):
    """Includes mechanisms whose settings follow the row length."""
    sizes = "--d_model 16 --num_heads 2 --d_ff 16 --length 32 --buckets 8 16 32"
    config = LRA.sized(config_of(LRA, f"text --mechanism {mechanism} --pooling {pooling} {sizes}"))
    check_read_alike(LRA.model(config), config.data.padded_lengths)


@pytest.fixture(scope="module")
def measured(runs):
    """The measures of the run, which are kept in its folder."""
    return eval.tasks.lra.measure_run(str(runs / "run"))


def test_a_run_leaves_what_it_should(runs):
    read = metrics_lines(runs / "run")
    assert [line["step"] for line in read] == list(range(1, 7))
    assert [line["step"] for line in read if "val_accuracy" in line] == [3, 6]
    assert all(0 <= line["accuracy"] <= 1 and "val_bits_per_byte" not in line for line in read)
    config = json.loads((runs / "run" / "config.json").read_text())
    assert [config["model"][name] for name in ("vocab_size", "num_classes", "max_length")] == [15, 10, 16]


def test_other_data_are_refused_before_they_are_read(runs, tmp_path):
    with pytest.raises(
        UserError, match=r"^--data_dir: the run in .* was started with None, got '.*nothing'; expected"
    ):
        train.lra.main(["listops", "--workdir", str(runs / "run"), "--data_dir", f"{tmp_path}/nothing"])


@pytest.mark.slow
def test_measuring(runs, capsys):
    eval.tasks.lra.main(["--workdir", str(runs / "run")])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["examples"] == 60
    assert result["chance"] == max(result["class_balance"])
    p = result["accuracy"]
    assert p * 60 == pytest.approx(round(p * 60), abs=1e-4)
    assert result["standard_error"] == pytest.approx(math.sqrt(p * (1 - p) / 60))
    assert result["errors_above_chance"] == pytest.approx((p - result["chance"]) / result["standard_error"])
    assert result["model"] == "local, w = 4"
    kept = json.loads((runs / "run" / "lra_test.json").read_text())
    assert kept.pop("measured_settings")["data.task"] == "listops"
    assert kept == result
    best = max(
        (line for line in metrics_lines(runs / "run") if "val_accuracy" in line),
        key=lambda line: line["val_accuracy"],
    )
    eval.tasks.lra.main(
        ["--workdir", str(runs / "run"), "--split", "valid", "--checkpoint", str(best["step"])]
    )
    valid = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert valid["accuracy"] == pytest.approx(best["val_accuracy"], abs=1e-6)
    assert valid["loss"] == pytest.approx(best["val_loss"], rel=1e-5)


def test_measures_are_printed_where_they_cannot_be_kept(runs, monkeypatch, capsys):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eval.harness.main.write_whole", full)
    eval.tasks.lra.main(["--workdir", str(runs / "run")])
    out, err = capsys.readouterr()
    assert "accuracy" in json.loads(out.splitlines()[-1])
    assert "eval.lra: the measures are not kept in" in err
    assert "No space left on device" in err


def test_a_measure_that_is_nan_is_an_error(runs, monkeypatch):
    monkeypatch.setattr(eval.tasks.lra.EVALUATION, "measure", lambda run, options: {"loss": float("nan")})
    with pytest.raises(UserError, match=r"--workdir: loss of .* is NaN at step .*may be damaged"):
        eval.tasks.lra.main(["--workdir", str(runs / "run")])


def test_the_table_measures_what_has_not_been(runs, tmp_path, capsys):
    shutil.copytree(runs / "run", tmp_path / "local")
    kept = tmp_path / "local" / "lra_test.json"
    kept.unlink(missing_ok=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"task": "lm", "data": {"data": "stdlib"}}')
    picture = tmp_path / "table.png"
    eval.tasks.lra.main(["--table", str(tmp_path), "--picture", str(picture)])
    text = capsys.readouterr().out
    assert "| local, w = 4 |" in text
    assert "| chance (the most frequent class) |" in text
    assert "| BRL-Former (m = 256) | 49.98 | 80.90 | 83.22 | 76.20 | 77.48 | 86.89 |" in text
    assert "| Kernelized Attention | 38.78 | 60.22 | 81.77 | 41.29 | 70.73 | - |" in text
    assert "| TransNormer T2 | 41.60 | 72.20 | 83.82 | 49.60 | 76.80 | - | 64.80 |" in text
    assert "Transformer (our-imp): 72.19 leaves pathx out; with it the average is 74.28" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert kept.exists()


def test_the_table_measures_a_changed_run_again(runs, measured, tmp_path, monkeypatch, capsys):
    """A stored result belongs to the best checkpoint of its time, and stays valid until a better one appears, or the
    run gets another number of test examples."""
    again = []

    def measure(run, options):
        again.append(run.config.data.test_examples)
        return Measured(measured)

    shutil.copytree(runs / "run", tmp_path / "local")
    monkeypatch.setattr(eval.tasks.lra.EVALUATION, "measure", measure)
    kept = tmp_path / "local" / "lra_test.json"
    written = json.loads(kept.read_text())
    for step, expected in ((measured["step"], []), (measured["step"] - 1, [60])):
        kept.write_text(json.dumps(written | {"step": step}))
        eval.tasks.lra.main(["--table", str(tmp_path)])
        assert again == expected
    again.clear()
    assert "of 6" not in capsys.readouterr().err
    config = json.loads((tmp_path / "local" / "config.json").read_text())
    config["loop"]["steps"] = 9
    for examples, expected in ((60, []), (7, [7]), (7, [7]), (60, [7, 60])):
        config["data"]["test_examples"] = examples
        (tmp_path / "local" / "config.json").write_text(json.dumps(config))
        eval.tasks.lra.main(["--table", str(tmp_path)])
        assert again == expected
    err = " ".join(capsys.readouterr().err.split())
    assert "is at step 6 of 9; the table has its best checkpoint so far" in err
    # --patience has ended this run, so it has no steps left.
    config["loop"]["patience"] = 2
    (tmp_path / "local" / "config.json").write_text(json.dumps(config))
    meta = tmp_path / "local" / "checkpoints" / "6" / "meta" / "metadata"
    for misses, mentioned in ((1, True), (2, False)):
        ended = json.loads(meta.read_text()) | {"best": {"score": 0.0, "misses": misses}}
        meta.write_text(json.dumps(ended))
        eval.tasks.lra.main(["--table", str(tmp_path)])
        assert ("is at step 6" in capsys.readouterr().err) == mentioned
    again.clear()
    shutil.rmtree(tmp_path / "local" / "checkpoints")  # the stored result is all that is left
    eval.tasks.lra.main(["--table", str(tmp_path)])
    assert again == []
    assert "| local, w = 4 |" in capsys.readouterr().out


@pytest.mark.slow
def test_the_table_leaves_out_what_cannot_be_measured(runs, tmp_path, capsys):
    """A new run and damaged ones cost one line each; a truncated or an earlier version's result is measured again."""
    for name in ("good", "begun", "damaged", "cut"):
        shutil.copytree(runs / "run", tmp_path / name)
        (tmp_path / name / "lra_test.json").unlink(missing_ok=True)
    (tmp_path / "good" / "lra_test.json").write_text('{"step": 6, "accu')
    shutil.copytree(runs / "run", tmp_path / "earlier")
    eval.tasks.lra.main(["--workdir", str(tmp_path / "earlier")])
    kept = tmp_path / "earlier" / "lra_test.json"
    written = json.loads(kept.read_text())
    kept.write_text(json.dumps({name: x for name, x in written.items() if name != "standard_error"}))
    shutil.rmtree(tmp_path / "begun" / "checkpoints")
    for params in (tmp_path / "damaged" / "checkpoints").glob("*/params"):
        shutil.rmtree(params)
    cut = tmp_path / "cut" / "config.json"
    cut.write_text(cut.read_text()[:-30])
    eval.tasks.lra.main(["--table", str(tmp_path)])
    out, err = capsys.readouterr()
    assert "| local, w = 4 |" in out
    assert json.loads(kept.read_text()) == written
    for name in ("begun", "damaged", "cut"):
        assert f"{tmp_path / name} is left out: " in err
    for name in ("good", "earlier"):
        shutil.rmtree(tmp_path / name)
    with pytest.raises(UserError, match=r"--table: none of the 2 runs under .* can be measured"):
        eval.tasks.lra.main(["--table", str(tmp_path)])


def started(run):
    """A classifier's parameters before and after it takes over the parameters of a run."""
    line = last_wins(f"{TINY} {LOCAL} --pretrained {run} --checkpoint last")
    config = LRA.sized(config_of(LRA, line, "listops"))
    objective = LRA.objective(LRA.model(config), config)
    fresh = drawn(objective.init)
    return fresh, objective.start(fresh)


@pytest.mark.slow
def test_pretraining_on_the_tasks_own_inputs(runs, tmp_path):
    """Trains on masked tokens; a classifier starts from that encoder's weights, and from a trained classifier's with
    its head."""
    run(tmp_path / "denoise", f"{LOCAL} --mask_share 0.3", "denoise-listops")
    assert [line["step"] for line in metrics_lines(tmp_path / "denoise")] == list(range(1, 7))
    fresh, params = started(tmp_path / "denoise")
    source = open_run([LRA_DENOISE], str(tmp_path / "denoise"), "last").params
    assert params["encoder"]["embedding"].shape[0] == 16  # 15 tokens and the mask
    np.testing.assert_array_equal(params["encoder"]["embedding"], source["encoder"]["embedding"])
    jax.tree.map(np.testing.assert_array_equal, params["head"], fresh["head"])
    _, params = started(runs / "run")
    source = open_run([LRA], str(runs / "run"), "last").params
    jax.tree.map(np.testing.assert_array_equal, params, source)
    for more, message in (
        (f"{LOCAL} --d_ff 8", "which has d_ff=16, got 8"),
        (f"{LOCAL} --positions learned", "which has positions=rope, got learned"),
    ):
        with pytest.raises(UserError, match=rf"--pretrained: expected the network of .*, {message}"):
            run(tmp_path / "other", f"{more} --pretrained {tmp_path / 'denoise'}")
    with pytest.raises(UserError, match=r"--pretrained: there is no|--pretrained: .*config\.json"):
        run(tmp_path / "other", f"{LOCAL} --pretrained {tmp_path / 'nothing'}")
    with pytest.raises(UserError, match=r"mask_share must be above 0 and below 1, got 1\.0"):
        run(tmp_path / "other", f"{LOCAL} --mask_share 1", "denoise-listops")


@pytest.mark.slow
def test_marks_of_lit_pixels_are_classified():
    """Loss and accuracy are means over lit pixels of real rows; padding rows don't count."""
    model = TokenClassifier(EncoderConfig(num_layers=1, d_model=8, num_heads=2, d_ff=8, inputs="scale"))
    objective = trace_objective(model)
    rng = np.random.default_rng(0)
    image, marks = rng.integers(256, size=(2, 12)), rng.integers(3, size=(2, 12))
    batch = {
        "tokens": np.stack([image, marks], axis=1).astype(np.int32),
        "lengths": np.full((2, 2), 12, np.int32),
        "weights": np.array([1.0, 0.0], np.float32),
    }
    params = drawn(objective.init)
    sums = jax.jit(lambda batch: objective.loss(params, None, batch, None))(batch)
    logits = np.asarray(model.apply({"params": params}, batch["tokens"][:1, 0])[0], np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    on, lit = marks[0] == 2, marks[0] > 0
    expected = -np.log(shares[np.arange(12), on.astype(int)])[lit].sum()
    np.testing.assert_allclose(sums[0], expected, rtol=1e-5)
    assert float(sums[1]) == lit.sum()
    assert float(sums[3]["accuracy"]) == ((logits.argmax(-1) == 1) == on)[lit].sum()


@pytest.mark.slow
def test_a_classifier_starts_from_a_tracer(tmp_path, capsys):
    """As a user runs it, on images of the easiest level, with the preset's network at a smaller depth."""
    small = (
        "--dashes 6 --train_examples 12 --valid_examples 4 --test_examples 4 --processes 1 --num_layers 1 --batch 4 "
        "--buckets 1024 --steps 2 --eval_every 2 --checkpoint_every 2 --tensorboard False"
    )
    train.lra.main(f"trace-pathfinder --workdir {tmp_path / 'trace'} {small}".split())
    *_, following = re.findall("next: python -m train.lra (.*)$", capsys.readouterr().err, re.MULTILINE)
    line = metrics_lines(tmp_path / "trace")[-1]
    assert 0 <= line["val_accuracy"] <= 1
    # The suggested command already names the network and images.
    few = f"--workdir {tmp_path / 'run'} --valid_examples 4 --batch 4 --steps 2 --eval_every 2 --tensorboard False"
    train.lra.main(last_wins([*shlex.split(following), *few.split(), "--learning_rate", "1e-12"]))
    traced, run = (
        open_run([LRA, LRA_TRACE], str(tmp_path / name), "last").params["encoder"]
        for name in ("trace", "run")
    )
    assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-6), traced, run))


def test_seeds_are_averaged():
    result = {
        "model": "m",
        "task": "image",
        "standard_error": 0.01,
        "chance": 0.1,
        "data": "d",
        "examples": 5,
    }
    result |= {"split": "test", "configuration": {"model.mechanism.beta": 0.5, "loop.steps": 600}}
    runs = [result | {"accuracy": accuracy, "seed": seed} for seed, accuracy in enumerate((0.2, 0.3, 0.4))]
    # Their spread, 10 points / sqrt(3), exceeds the standard error of 15 answers.
    assert "| m | 30.00 ± 5.77 (3 seeds) |" in markdown(runs)
    assert markdown(runs).startswith("Accuracy on the test split")
    assert "- image: d, 5 valid examples" in markdown([each | {"split": "valid"} for each in runs])
    # Runs that differ in a setting outside the model's name are kept apart, and seeds are averaged within each.
    other = {"configuration": {"model.mechanism.beta": 0.0, "loop.steps": 600}}
    table = markdown([runs[0], runs[1] | other, runs[2], runs[0] | other])
    assert "| m, beta 0.5 | 30.00 ± 10.00 (2 seeds) |" in table
    assert "| m, beta 0.0 | 25.00 ± 5.00 (2 seeds) |" in table
    # Alike runs differ by chance: the answers' error, 1 point / sqrt(2).
    assert "| m | 20.00 ± 0.71 (2 seeds) |" in markdown([runs[0], runs[0] | {"seed": 1}])


def test_what_is_compared_of_runs():
    """Excludes the seed and whatever a resumed run may change, except the steps."""
    config = config_of(LRA, "listops")
    settings = compared(LRA, config)
    assert settings["loop.steps"] == config.loop.steps
    assert settings["optimizer.learning_rate"] == config.optimizer.learning_rate
    assert "model.mechanism.beta" in settings
    assert not {"loop.seed", "loop.workdir", "loop.eval_every", "data.cache_dir", "data.data_dir"} & set(
        settings
    )


def test_every_row_of_the_papers_tables_is_there_and_averages_to_what_they_print():
    """The papers' own averages check our copies of their figures; two rows disagree with their printed average."""
    assert {paper: len(rows) for paper, rows in PAPERS.items()} == {BRL: 19, BRL_ABLATION: 5, TRANSNORMER: 15}
    for paper, rows in PAPERS.items():
        for model, row in rows.items():
            without = paper == BRL_ABLATION or model == "BRL-Former (m = 64)"
            assert (row.average is None) == without, (paper, model)
            own = np.mean(list(row.accuracies.values()))
            notes = [note for note in NOTES.get(paper, ()) if note.startswith(f"{model}: ")]
            if notes:
                assert f"average is {own:.2f}" in notes[0].replace("of the row ", "")
                assert f"{row.average:.2f}" in notes[0]
            elif not without:
                assert own == pytest.approx(row.average, abs=0.0101), (paper, model)
    *others, _ = PAPERS[BRL]["Transformer (our-imp)"].accuracies.values()
    assert np.mean(others) == pytest.approx(72.19, abs=0.0101)


@pytest.mark.parametrize(
    ("preset", "options", "label"),
    [
        ("image", "local --mechanism.pattern neighbourhood --mechanism.window 6", "local, 7 x 7"),
        ("image", "brl --mechanism.pattern neighbourhood --mechanism.window 6", "BRL, 7 x 7, m = 64"),
        ("image", "local --mechanism.pattern block", "local, w = 128, block"),
        ("listops", "brl --mechanism.memory layer", "BRL, w = 16, m = 16"),
        ("listops", "brl --mechanism.memory output", "BRL, w = 16, m = 16, output memory"),
        ("listops", "brl --mechanism.memory output --mechanism.gamma 0",
         "BRL, w = 16, m = 16, output memory, without difference"),
    ],
)  # fmt: skip
def test_variants_of_a_mechanism_have_separate_rows(preset, options, label):
    config = config_of(LRA, f"--mechanism {options}", preset)
    assert eval.tasks.lra.label(config.model) == label


def test_mechanisms_have_room_for_a_class_token():
    for name in ("linformer", "sinkhorn", "synthesizer", "cosformer"):
        config = PRESETS[f"lra-text-original-{name}"]
        assert config.model.mechanism.max_length > config.data.padded_lengths[-1]


def test_every_row_of_the_papers_tables_has_its_presets():
    """One for each task of which the row has an accuracy; the options after it parse."""
    figures = [row for rows in PAPERS.values() for row in rows.values()]
    for row in figures:
        name, *options = row.preset.split()
        assert {f"lra-{task}-{name}" for task in row.accuracies} <= PRESETS.keys()
        if options:
            config_of(LRA, [f"lra-image-{name}", *options])
    assert len({row.preset for row in figures}) == 35
