"""eval.compute: operations and losses of runs, as a table and a picture."""

import json

import pytest

import train.lm
from eval.compute import main
from tests.train.logs import metrics_lines
from train.errors import UserError

TINY = (
    "--steps 4 --batch 2 --length 16 --num_layers 1 --d_model 16 --num_heads 2 --d_ff 16 --ffn relu --eval_every 2 "
    "--eval_tokens 40 --warmup_steps 1 --sample_tokens 0 --tensorboard False"
)


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
        train.lm.main(argv.split())
    capsys.readouterr()
    main(["--workdir", f"{tmp_path}/runs/full-0"])
    result = json.loads(capsys.readouterr().out)
    # Four projections and two maps of 16 x 16, 136 pairs of 8 + 8 features in two heads, and 256 logits.
    row = 16 * 6 * 16 * 16 + 136 * 2 * 16 + 16 * 16 * 256
    assert result["flops_per_token"] == 6 * row / 16
    assert result["attention_share"] == pytest.approx(136 * 2 * 16 / row)
    evaluated = [line for line in metrics_lines(tmp_path / "runs" / "full-0") if "val_loss" in line]
    assert result["whole"]
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
    # The program of full attention multiplies all 256 pairs, of which the formulas count the 136 that are seen.
    main(["--workdir", f"{tmp_path}/runs/full-0", "--count", "program"])
    result = json.loads(capsys.readouterr().out)
    assert result["flops_per_token"] == 6 * (row + (256 - 136) * 2 * 16) / 16
    assert [point["tokens"] for point in result["curve"]] == [64, 128]
    with pytest.raises(UserError, match=r"--table: no run of train\.lm under"):
        main(["--table", f"{tmp_path}/nothing"])
    (tmp_path / "runs" / "window" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="window has no evaluation"):
        main(["--workdir", f"{tmp_path}/runs/window"])
