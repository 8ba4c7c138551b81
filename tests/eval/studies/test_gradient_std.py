"""eval.gradient_std: reads what training logged and plots it."""

import json

import pytest
from etils import epath

from eval.studies.gradient_std import main
from train.engine.config_file import write_json
from train.engine.errors import UserError
from train.tasks.lm import LM
from train.tasks.lm_config import PRESETS

#: Step, norm of the gradient, and both deviations so far.
LOGGED = [(1, 100.0, 0.0, 0.0), (2, 1.0, 0.5, 0.75), (3, 3.0, 0.25, 0.5)]


def _run(folder, lines):
    write_json(LM.to_json(PRESETS["small"]), epath.Path(folder) / "config.json")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_command(tmp_path, capsys):
    names = ("step", "grad_norm", "grad_rsd", "grad_rsd_tensors")
    logged = _run(tmp_path / "logged", [dict(zip(names, values)) for values in LOGGED])
    picture = tmp_path / "rsd.png"
    main(["--workdir", logged, logged, "--after", "1", "--picture", str(picture)])
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    # After the first step the norms are 1 and 3: deviation 1, mean 2.
    expected = {"step": 3, "grad_rsd": 0.25, "grad_rsd_tensors": 0.5, "grad_rsd_after": 0.5}
    assert first == second == {"workdir": logged, "mechanism": "brl", **expected}
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"--after: .*logged ends at step 3, got 3"):
        main(["--workdir", logged, "--after", "3"])
    with pytest.raises(UserError, match="plain was trained without --log_gradient_std"):
        main(["--workdir", _run(tmp_path / "plain", [{"step": 1, "grad_norm": 1.0}])])
    with (tmp_path / "logged" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "grad_r')  # cut off by a crash
    main(["--workdir", logged])
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 3
    assert "grad_rsd_after" not in found
