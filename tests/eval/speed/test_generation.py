"""eval.speed --generation: its rows, lines and picture, on a small network."""

import json

import numpy as np
import pytest

from eval.speed.__main__ import main
from eval.speed.generation import GenerationOptions, _parameters, _plain_prompt, lines

SMALL = ["--heads", "2", "--head_dim", "8", "--layers", "4", "--window", "8", "--context", "4"]
SMALL += ["--vocabulary", "11", "--repeats", "1"]


@pytest.mark.slow
def test_times_both_networks_and_draws(tmp_path, capsys):
    path = tmp_path / "rows.json"
    more = ["--plain", "in_place", "concatenated", "reread", "--pictures", str(tmp_path / "new")]
    main(["--generation", *SMALL, "--lengths", "16", "--json", str(path), *more])
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert all(rows["tlinformer"][f"{what}_s"] > 0 for what in ("first_token", "miss", "hit"))
    assert rows["plain decoder"]["hit_s"] > 0
    assert rows["plain decoder, concatenated"]["hit_s"] > 0
    assert rows["plain decoder, reread"]["hit_s"] > 0
    assert rows["plain decoder, prompt"]["first_token_s"] > 0
    # Every 4 layers of a block share one history of 24 tokens: keys, values and tokens, plus parts of fixed size.
    assert rows["plain decoder"]["cache_bytes"] > 4 * 24 * 2 * 16 * 4
    assert (tmp_path / "new" / "generation.png").stat().st_size > 10_000
    assert "reread" in capsys.readouterr().out


def test_every_round_reads_the_prompt_from_an_empty_cache():
    """In the second round too: the last token gets the same logits."""
    options = GenerationOptions(heads=2, head_dim=8, layers=4, window=8, context=4, vocabulary=11)
    program = _plain_prompt(options, _parameters(options), 16).programs["first_token"]
    first, second = (np.asarray(program.run()) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_lines_through_misses_and_hits():
    rows = [
        {"name": "tlinformer", "length": n, "miss_s": 0.01 + n * 1e-5, "hit_s": 0.002, "note": ""}
        for n in (1024, 8192, 16384, 32768)
    ]
    miss = lines(rows)["miss"]
    assert miss["intercept_ms"] == pytest.approx(10)
    assert miss["ms_per_1000_tokens"] == pytest.approx(10)
    assert miss["r_squared"] == pytest.approx(1)
    assert miss["from"] == 8192
    assert not lines(rows[:3])
