"""eval.papers on folders of runs."""

import dataclasses
import json

from etils import epath

from eval.tasks import papers
from eval.tasks.paper_tables import TABLES
from eval.tasks.paper_tables.table import PaperTable
from tests.support.command_lines import config_of
from train.engine.config_file import write_json
from train.tasks.graph import GRAPH
from train.tasks.lm import LM
from train.tasks.lm_config import PRESETS

NAME = "wikitext103-brl-paper-64"
TABLE = PaperTable(
    "A paper, table 1",
    "lm",
    {"PPL (val)": "val_perplexity", "PPL (test)": "test_perplexity"},
    {"first": (NAME, 20.5, None), "second": ("wikitext103-local", 1.0, 2.0), "third": ("", 3.0, 4.0)},
)


def _run(folder, config, *, steps, loss):
    write_json(LM.to_json(config), epath.Path(folder) / "config.json")
    lines = [{"step": 1, "loss": 9.0, "val_loss": 8.0}, {"step": steps, "loss": 5.0, "val_loss": loss}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_runs_stand_next_to_the_papers_figures(tmp_path):
    preset = PRESETS[NAME]
    smaller = dataclasses.replace(
        preset,
        model=dataclasses.replace(preset.model, d_model=64, vocab_size=999),
        loop=dataclasses.replace(preset.loop, seed=3, steps=7),
    )
    for seed, config, loss in ((0, preset, 0.0), (1, smaller, 1.0)):
        _run(tmp_path / NAME / str(seed), config, steps=7, loss=loss)
    _run(tmp_path / "another", preset, steps=5, loss=1.0)
    _run(tmp_path / "wikitext103-local-12", PRESETS["wikitext103-local"], steps=5, loss=1.0)
    # Another preset, not the 64th seed.
    _run(tmp_path / "wikitext103-local-64", PRESETS["wikitext103-local-64"], steps=5, loss=1.0)
    (tmp_path / NAME / "0" / "lm_test.json").write_text('{"perplexity": 3.25, "split": "test"}')
    shown = papers.beside_runs(TABLE, tmp_path)
    assert shown.rows == [
        ("first", NAME, "20.5", "1", "-", "3.25", "7", ""),
        ("first", NAME, "20.5", "2.718", "-", "-", "7", "steps 100000 -> 7, d_model 512 -> 64"),
        ("second", "wikitext103-local", "1.0", "2.718", "2.0", "-", "5", ""),
        ("third", "-", "3.0", "-", "4.0", "-", "-", "-"),
    ]


def test_what_no_run_has_measured_has_no_column_for_runs(tmp_path):
    _run(tmp_path / "wikitext103-full", PRESETS["wikitext103-full"], steps=7, loss=1.0)
    shown = papers.beside_runs(TABLES["brl-table-7"], tmp_path)
    assert str(shown).splitlines()[2].startswith("| row | preset | n = 128 | 256 | 512 |")
    figures = ("4.24", "4.26", "4.4", "10.28", "29.19", "61.95", "92.27")
    assert shown.rows[0] == ("full", "wikitext103-full", *figures, "7", "")


def test_what_the_data_decide_is_no_difference():
    preset = GRAPH.presets["acm-gcn"]
    data = dataclasses.replace(preset.data, row_targets=726)
    model = dataclasses.replace(preset.model, num_features=9, num_layers=5)
    config = dataclasses.replace(preset, data=data, model=model)
    layers = preset.model.num_layers
    assert papers.other_settings(GRAPH, preset, config) == [f"num_layers {layers} -> 5"]


def test_costs_equal_the_loops_count():
    """The count by hand: two per weight and token, three passes, and attention."""
    sizes = "--steps 10 --batch 8 --accumulation 4 --length 16 --num_layers 2 --d_model 32 --num_heads 2 --d_ff 64"
    small = LM.sized(config_of(LM, f"wikitext103-full {sizes}"))
    parameters, operations = papers.training_cost(LM, small)
    norms = 5 * 32
    table = 50257 * 32
    layers = 2 * (4 * 32 * 32 + 3 * 32 * 64)
    assert parameters == table + layers + norms
    pairs = 2 * 2 * 32 * 16
    assert operations == 10 * 8 * 16 * 3 * 2 * (table + layers + pairs)


def test_the_list(capsys):
    papers.main([])
    printed = capsys.readouterr().out
    assert all(name in printed for name in TABLES)
