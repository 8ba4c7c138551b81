"""eval.survey: its networks, which runs it repeats, its table and picture, and the whole command on a tiny task."""

import dataclasses
import json
from pathlib import Path

import pytest

from brl_jax.attention.local.patterns import SlidingWindow
from brl_jax.configuration import to_json
from brl_jax.layers import MECHANISMS, DiagConfig, NormConfig
from eval.harness.pictures import save
from eval.speed import training as speed_training
from eval.speed.networks import CONTROL, network, network_names
from eval.speed.options import SpeedOptions
from eval.studies.survey import main as survey
from eval.studies.survey.options import SIZES, SurveyOptions, survey_run, survey_runs
from eval.studies.survey.table import collect, draw, markdown
from eval.tasks.lra import KEPT
from train.engine.config_file import differences
from train.engine.errors import RunError, UserError
from train.tasks.lra import LRA
from train.tasks.lra_config import PRESETS


def test_every_bidirectional_mechanism_has_a_network_and_the_control_mixes_nothing():
    listed = [name for name, kind in MECHANISMS.items() if kind().bidirectional]
    assert network_names() == (*listed, "transnormer_t1", "transnormer_t2", CONTROL)
    assert "deltanet" not in network_names()
    cases = speed_training.classifiers(SpeedOptions(), 64)
    assert sorted(case.name for case in cases) == sorted(network_names())
    assert {case.name: case.growth for case in cases}["full"] == 2
    alone = network(CONTROL, length=128, size=16).mechanism
    assert alone.make_pattern(is_causal=False) == SlidingWindow(0, 0)


def test_sizes_follow_the_task():
    brl = network("brl", length=128, size=16).mechanism
    assert (brl.window, brl.num_compressed) == (16, 16)
    assert (brl.memory, brl.block_size) == ("layer", None)
    assert network("cosformer", length=100).mechanism.max_length == 100
    assert network("linformer", length=100, size=8).mechanism.num_projected == 8
    assert network("linformer", length=100).mechanism.num_projected == 256
    t1 = network("transnormer_t1", length=128, size=16)
    assert isinstance(t1.mechanism, DiagConfig)
    assert t1.mechanism.block_size == 16
    assert isinstance(t1.late_mechanism, NormConfig)


def test_runs_are_the_presets_with_other_mechanisms():
    options = SurveyOptions(mechanisms=("full", "brl", CONTROL), seeds=(0, 2), text_dir="t", image_dir="i")
    runs = survey_runs(options)
    order = [(run.config.loop.seed, run.task, run.name) for run in runs]
    names = ("brl", CONTROL, "full")  # linear cost first
    assert order == [(seed, task, name) for seed in (0, 2) for task in SIZES for name in names]
    own = {"mechanism", "late_mechanism", "vocab_size", "num_classes", "max_length", "num_layers"}
    for run in runs:
        preset, config = PRESETS[run.task], run.config
        for field in dataclasses.fields(config.model):
            if field.name not in own:
                assert getattr(config.model, field.name) == getattr(preset.model, field.name), field.name
        assert config.optimizer.learning_rate == preset.optimizer.learning_rate
        assert config.data.padded_lengths == (preset.data.length,)
    assert len({run.config.loop.workdir for run in runs}) == len(runs)


def _trained(monkeypatch, failing=()):
    """Replaces training and measuring by writing their files; returns the list of folders that it trains in."""
    began: list[str] = []

    def run_task(task, config):
        folder = Path(config.loop.workdir)
        began.append(str(folder.relative_to(folder.parents[2])))
        if began[-1] in failing:
            raise RunError("step 1: loss is nan")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(task.to_json(config)))
        (folder / "checkpoint").touch()

    def measure_run(workdir):
        (Path(workdir) / KEPT).write_text(json.dumps({"accuracy": 0.5}))

    monkeypatch.setattr(survey, "run_task", run_task)
    monkeypatch.setattr(survey, "measure_run", measure_run)
    return began


def test_missing_data_are_named_before_any_run(tmp_path, monkeypatch):
    began = _trained(monkeypatch)
    with pytest.raises(UserError, match=r"^--text_dir: /nowhere does not exist$"):
        survey.train_all(survey_runs(SurveyOptions(folder=str(tmp_path), text_dir="/nowhere")))
    assert began == []


def test_a_finished_run_is_not_repeated_and_a_changed_one_is(tmp_path, monkeypatch):
    began = _trained(monkeypatch)
    options = SurveyOptions(
        folder=str(tmp_path), tasks=("listops",), mechanisms=("local", "full"), seeds=(0, 1)
    )
    everything = ["listops/local/0", "listops/full/0", "listops/local/1", "listops/full/1"]

    def train(**changes):
        began.clear()
        survey.train_all(survey_runs(dataclasses.replace(options, **changes)))
        return began

    assert train() == everything
    assert train() == []
    assert train(seeds=(0, 1, 2)) == ["listops/local/2", "listops/full/2"]
    (tmp_path / "listops/full/1" / KEPT).unlink()  # stopped before it was measured
    assert train() == ["listops/full/1"]
    # This one stopped in the middle, where eval.lra measured it.
    (tmp_path / "listops/full/1/checkpoints/50").mkdir(parents=True)
    assert train() == ["listops/full/1"]
    (tmp_path / "listops/full/1/checkpoints/50").rename(tmp_path / "listops/full/1/checkpoints/300")
    assert train() == []
    # Another batch size makes it a different run, and nothing of the old ones may remain.
    marker = tmp_path / "listops/local/0/marker"
    marker.touch()
    assert train(batch=4) == everything
    assert not marker.exists()
    # More test examples or more steps need no new run: the trained one is measured again.
    marker.touch()
    assert train(batch=4, test_examples=1001) == everything
    assert marker.exists()
    assert survey.finished(survey_run(dataclasses.replace(options, batch=4), "listops", "full", 0)) is None
    # A field added since the run was trained takes its default.
    config = json.loads((tmp_path / "listops/full/0/config.json").read_text())
    assert config["loop"].pop("log_gradient_std") is False
    (tmp_path / "listops/full/0/config.json").write_text(json.dumps(config))
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert train(folder=str(moved), batch=4, test_examples=1001) == []


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path, monkeypatch):
    began = _trained(monkeypatch, failing=("listops/local/0",))
    options = SurveyOptions(
        folder=str(tmp_path), tasks=("listops",), mechanisms=("local", "full"), seeds=(0,)
    )
    with pytest.raises(RunError, match=r"no result of .*listops/local/0"):
        survey.train_all(survey_runs(options))
    assert began == ["listops/local/0", "listops/full/0"]


def test_the_folder_of_another_run_is_not_removed(tmp_path, monkeypatch):
    _trained(monkeypatch)
    options = SurveyOptions(folder=str(tmp_path), tasks=("listops",), mechanisms=("local",), seeds=(0,))
    folder = tmp_path / "listops/local/0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"task": "lm"}')
    with pytest.raises(UserError, match=r"--folder: .* holds a run of another task"):
        survey.train_all(survey_runs(options))
    assert folder.exists()


def test_times_belong_to_the_networks(tmp_path):
    options = SurveyOptions(folder=str(tmp_path), tasks=("listops",), mechanisms=("local", "full"))
    runs = [survey_run(options, "listops", name, 0) for name in options.mechanisms]
    assert survey.kept_speeds(runs) is None
    kept = {
        "networks": survey.networks(runs),
        "rows": [{"name": run.name, "train_s": 0.5} for run in runs],
    }
    (tmp_path / "listops").mkdir()
    (tmp_path / "listops/speed.json").write_text(json.dumps(kept))
    assert survey.kept_speeds(runs)["full"]["train_s"] == 0.5
    assert list(survey.kept_speeds(runs[:1])) == ["local"]
    other = dataclasses.replace(options, mechanisms=("local", "full", "linear"))
    more = [survey_run(other, "listops", name, 0) for name in other.mechanisms]
    assert survey.kept_speeds(more) is None
    wide = survey_run(dataclasses.replace(options, batch=3), "listops", "full", 0)
    assert survey.kept_speeds([wide]) is None


def _results():
    """Accuracies of three networks with two seeds each, as eval.lra measures them, and times of two."""
    shares = {"full": (0.40, 0.44), "linear": (0.30, 0.30), CONTROL: (0.13, 0.11)}
    common = {"standard_error": 0.01, "chance": 0.125, "data": "d", "examples": 100, "workdir": "w"}
    results = [
        common
        | {
            "network": name,
            "task": task,
            "accuracy": share,
            "seed": seed,
            "parameters": 2000 + (task == "text"),
        }
        for name, accuracies in shares.items()
        for task in ("listops", "text")
        for seed, share in enumerate(accuracies)
    ]
    rows = {
        "full": {"train_s": 0.5, "train_bytes": 2**22},
        "linear": {"train_s": 0.125, "train_bytes": 2**20},
    }
    return results, {"listops": rows, "text": rows}


def test_table():
    results, speeds = _results()
    tasks = ("listops", "text")
    cells = collect(results, speeds, ("linear", "full", CONTROL, "gau"), tasks)
    lines = markdown(cells, tasks).splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert rows[1:] == [
        "| full | 2 | 42.00 ± 2.00 (2) | 42.00 ± 2.00 (2) | 42.00 | 2 | 2 | 4 | 4 |",
        "| linear | 2 | 30.00 ± 0.71 (2) | 30.00 ± 0.71 (2) | 30.00 | 8 | 8 | 1 | 1 |",
        "| no_mixing | 2 | 12.00 ± 1.00 (2) † | 12.00 ± 1.00 (2) † | 12.00 | - | - | - | - |",
        "| gau | - | - | - | - | - | - | - | - |",
        "| chance (the most frequent class) | - | 12.50 | 12.50 | - | - | - | - | - |",
    ]
    assert lines[-1] == (
        "- text tells mechanisms apart: 2 of 2 networks exceed no_mixing by three standard errors of the difference "
        "or more; linear by 14.7, full by 13.4."
    )
    alike = [result | {"accuracy": 0.12} for result in results]
    assert "does NOT tell mechanisms apart" in markdown(collect(alike, {}, ("full", CONTROL), tasks), tasks)


def test_picture(tmp_path):
    results, speeds = _results()
    cells = collect(results, speeds, ("linear", "full", CONTROL), ("listops", "text"))
    figure = draw(cells, ("listops", "text"))
    titles = [axes.get_title().split(";")[0] for axes in figure.axes if axes.get_visible()]
    assert titles == ["listops", "text", "mean of the tasks"]
    mean = figure.axes[2]
    # Linear attention: four times as fast as full attention in a quarter of its memory; the control has no times.
    assert [text.get_text() for text in mean.texts] == ["linear (0.25 x)", "full (1.00 x)"]
    offsets = mean.collections[-1].get_offsets()
    assert offsets.tolist() == [[pytest.approx(4.0), pytest.approx(30.0)], [pytest.approx(1.0), 42.0]]
    assert save(figure, tmp_path / "survey.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_whole_command(tmp_path, capsys, monkeypatch):
    tiny = "--steps 2 --batch 2 --train_examples 64 --test_examples 16 --seeds 0 1 --tasks listops"
    argv = [*tiny.split(), "--folder", str(tmp_path / "s"), "--mechanisms", "local", CONTROL]
    picture = tmp_path / "survey.png"
    survey.main([*argv, "--repeats", "2", "--picture", str(picture)])
    printed = capsys.readouterr().out
    assert "| local | 93 |" in printed
    assert "± " in printed
    assert "(2)" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    speed = json.loads((tmp_path / "s/listops/speed.json").read_text())
    assert {row["name"] for row in speed["rows"]} == {"local", CONTROL}
    assert all(row["train_s"] > 0 and row["train_bytes"] > row["train_temp_bytes"] for row in speed["rows"])
    config = json.loads((tmp_path / "s/listops/local/1/config.json").read_text())
    run = survey_runs(
        SurveyOptions(folder="s", tasks=("listops",), mechanisms=("local",), seeds=(1,), steps=2, batch=2)
    )[0]
    free = {"network", "data.train_examples", "data.valid_examples", *LRA.free_fields()}
    assert differences(config, json.loads(json.dumps({"task": "lra", **to_json(run.config)})), free) == []
    # Nothing is left to do, and the table is the same.
    monkeypatch.setattr(survey, "run_task", None)
    monkeypatch.setattr(survey, "measure_speeds", None)
    survey.main([*argv, "--repeats", "2"])
    assert capsys.readouterr().out == printed
