"""eval.compute: operations and losses of runs, as a table and a picture."""

import json

import pytest

import train.lm
from eval.studies.compute import _curve, draw, main, markdown
from tests.support.command_lines import last_wins
from tests.support.logs import metrics_lines
from train.engine.errors import UserError

TINY = (
    "--steps 4 --batch 2 --length 16 --num_layers 1 --d_model 16 --num_heads 2 --d_ff 16 --ffn relu --eval_every 2 "
    "--eval_tokens 40 --warmup_steps 1 --sample_tokens 0 --tensorboard False --tokenizer bytes"
)


def _result(seed, steps, *, whole=True):
    curve = [
        {
            "step": s,
            "tokens": 9 * s,
            "tflop": 2.0 * s,
            "loss": 1 / s + seed,
            "whole": whole and s == steps[-1],
        }
        for s in steps
    ]
    return {
        "configuration": {"model.mechanism.name": "full"},
        "parameters": 7,
        "flops_per_token": 1.0,
        "attention_share": None,
        "tflop": curve[-1]["tflop"],
        "loss": curve[-1]["loss"],
        "whole": whole,
        "curve": curve,
        "seed": seed,
    }


def test_seeds_of_different_lengths():
    """The curve covers the evaluations that all seeds have; the table shows where each seed ended."""
    runs = [_result(0, (2, 4, 6, 8)), _result(1, (2, 6))]
    points, means = _curve(runs)
    assert [point["step"] for point in points] == [2]  # 8 and 6 were measured on different text
    assert means == pytest.approx([1.0])
    assert "| 8, 6 | 16.00, 12.00 | 0, 1 |" in markdown(runs)
    assert len(draw(runs).axes) == 3
    points, _ = _curve([_result(0, (5,))])  # the only evaluation
    assert [point["step"] for point in points] == [5]


@pytest.mark.slow
def test_command(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a word follows another word and so on\n" * 20)
    for name, options in {
        "full-0": "--mechanism full --seed 0",
        "full-1": "--mechanism full --seed 1",
        "window": "--mechanism local --mechanism.window 4",
        "other": "--mechanism deltanet",
    }.items():
        folder = tmp_path / "others" if name == "other" else tmp_path / "runs"
        argv = f"--workdir {folder}/{name} --data text:{tmp_path}/text.txt {TINY} {options}"
        train.lm.main(last_wins(argv))
    capsys.readouterr()
    main(["--workdir", f"{tmp_path}/runs/full-0"])
    result = json.loads(capsys.readouterr().out)
    # Four projections and two maps of 16 x 16, 136 pairs of 8 + 8 features in two heads, and 256 logits.
    row = 16 * 6 * 16 * 16 + 136 * 2 * 16 + 16 * 16 * 256
    assert result["flops_per_token"] == 6 * row / 16
    assert result["attention_share"] == pytest.approx(136 * 2 * 16 / row)
    evaluated = [line for line in metrics_lines(tmp_path / "runs" / "full-0") if "val_loss" in line]
    assert result["whole"]
    assert [point["whole"] for point in result["curve"]] == [False, True]
    assert [point["step"] for point in result["curve"]] == [2, 4]
    assert [point["loss"] for point in result["curve"]] == [line["val_loss"] for line in evaluated]
    assert result["tflop"] == pytest.approx(4 * 2 * 6 * row / 1e12)

    picture = tmp_path / "compute.png"
    main(["--table", f"{tmp_path}/runs", "--picture", str(picture)])
    *_, full, local = capsys.readouterr().out.splitlines()
    assert full.startswith("| full | ")
    assert "| 4 | 0.00 | 0, 1 |" in full
    assert local.startswith("| local | ")
    assert picture.stat().st_size > 10_000
    with pytest.raises(
        UserError,
        match="mechanism deltanet: its multiplications are not counted by formulas; use --count program",
    ):
        main(["--workdir", f"{tmp_path}/others/other"])
    main(["--workdir", f"{tmp_path}/others/other", "--count", "program"])
    assert json.loads(capsys.readouterr().out)["attention_share"] is None
    # The program of full attention multiplies all 256 pairs; the formulas count only the 136 visible ones.
    main(["--workdir", f"{tmp_path}/runs/full-0", "--count", "program"])
    result = json.loads(capsys.readouterr().out)
    assert result["flops_per_token"] == 6 * (row + (256 - 136) * 2 * 16) / 16
    assert [point["tokens"] for point in result["curve"]] == [64, 128]
    with pytest.raises(UserError, match=r"--table: no run of train\.lm under"):
        main(["--table", f"{tmp_path}/nothing"])
    # An unfinished run has only losses on the beginning of the held-out text.
    folder = tmp_path / "runs" / "full-1"
    steps = (folder / "config.json").read_text()
    assert '"steps": 4' in steps
    (folder / "config.json").write_text(steps.replace('"steps": 4', '"steps": 8'))
    main(["--table", f"{tmp_path}/runs"])
    output = capsys.readouterr()
    assert "| 4 | 0.00 | 0 |" in output.out
    assert "full-1 is at step 4 of 8; the table has its losses so far" in output.err
    assert "full-1 is left out: its last loss is of the beginning of the held-out text" in output.err
    main(["--workdir", str(folder)])
    assert [point["whole"] for point in json.loads(capsys.readouterr().out)["curve"]] == [False, False]
    (tmp_path / "runs" / "window" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="window has no evaluation"):
        main(["--workdir", f"{tmp_path}/runs/window"])
