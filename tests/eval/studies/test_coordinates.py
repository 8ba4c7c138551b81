"""eval.coordinates: activations change equally at every width under muP, and more in wider models without it."""

import json

import pytest

from eval.studies.coordinates import main

TINY = "--widths 16 256 --num_heads 2 --num_layers 1 --steps 3 --batch 2 --length 16 --learning_rate 0.01"


@pytest.mark.slow
def test_command(tmp_path, capsys):
    picture = tmp_path / "coordinates.png"
    main([*TINY.split(), "--mechanism", "full", "--picture", str(picture)])
    standard, ours = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (standard["parametrization"], ours["parametrization"]) == ("standard", "muP")
    names = {"mixer", "feed-forward network", "logits"}
    assert set(standard["slope"]) == set(ours["slope"]) == names
    assert all(len(moved) == 3 for name in names for moved in ours["change"][name])
    # The narrowest width is the base, where both are the same.
    for name in names:
        assert ours["change"][name][0] == pytest.approx(standard["change"][name][0], rel=1e-4)
    assert standard["slope"]["logits"] > 0.35
    assert max(ours["slope"].values()) < 0.2
    assert picture.read_bytes().startswith(b"\x89PNG")
