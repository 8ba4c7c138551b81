"""eval.gradient_std: reads what training logged and plots it."""

import json

import pytest

import train.lm
from eval.studies.gradient_std import main
from tests.support.command_lines import last_wins
from tests.train.logs import metrics_lines
from train.engine.errors import UserError

TINY = (
    "--batch 2 --length 8 --num_layers 1 --d_model 16 --num_heads 2 --d_ff 16 --eval_tokens 20 --mechanism full "
    "--warmup_steps 1 --sample_tokens 0 --tensorboard False"
)


def _train(folder, name, steps, *more):
    argv = f"--workdir {folder}/{name} --data text:{folder}/text.txt --steps {steps} {TINY}"
    train.lm.main(last_wins([*argv.split(), *more]))


@pytest.mark.slow
def test_command(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a word follows another word and so on\n" * 20)
    _train(tmp_path, "logged", 5, "--log_gradient_std", "True")
    lines = metrics_lines(tmp_path / "logged")
    assert lines[0]["grad_rsd"] == lines[0]["grad_rsd_tensors"] == 0.0
    norms = [line["grad_norm"] for line in lines]
    mean = sum(norms) / 5
    deviation = (sum((norm - mean) ** 2 for norm in norms) / 5) ** 0.5
    assert lines[-1]["grad_rsd"] == pytest.approx(deviation / mean, rel=1e-4)
    assert lines[-1]["grad_rsd_tensors"] > 0
    capsys.readouterr()

    picture = tmp_path / "rsd.png"
    main(["--workdir", f"{tmp_path}/logged", f"{tmp_path}/logged", "--after", "2", "--picture", str(picture)])
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == second
    assert first["mechanism"] == "full"
    assert {name: first[name] for name in ("step", "grad_rsd")} == {
        "step": 5,
        "grad_rsd": lines[-1]["grad_rsd"],
    }
    mean = sum(norms[2:]) / 3
    deviation = (sum((norm - mean) ** 2 for norm in norms[2:]) / 3) ** 0.5
    assert first["grad_rsd_after"] == pytest.approx(deviation / mean, rel=1e-6)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"--after: .*logged ends at step 5, got 5"):
        main(["--workdir", f"{tmp_path}/logged", "--after", "5"])

    _train(tmp_path, "plain", 1)
    assert "grad_rsd" not in (tmp_path / "plain" / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match="plain was trained without --log_gradient_std True"):
        main(["--workdir", f"{tmp_path}/plain"])
    with (tmp_path / "logged" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "grad_r')  # cut off by a crash
    main(["--workdir", f"{tmp_path}/logged"])
    assert json.loads(capsys.readouterr().out)["step"] == 5
