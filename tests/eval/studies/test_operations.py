"""eval.tlinformer_operations: counted multiplications against the formulas."""

import json

import pytest

from eval.studies.tlinformer_operations import OperationsOptions, counted, main, pair_slope


def _options(blocks):
    return OperationsOptions(
        lengths=(2048, 3072), window=64, context=32, hidden=1, layers=3 * blocks, heads=2, head_dim=8,
        vocabulary=11,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2])
def test_tlinformers_slopes_are_twice_the_equations(blocks):
    """Per token of history, the multiplications of pairs for scores and values. Blocks after the first add the restored
    rows': query, output and feed-forward network in one layer, key and value in the next."""
    options = _options(blocks)
    short, long = (counted(options, n) for n in options.lengths)
    rows = (blocks - 1) * (2 * 16**2 + 3 * 16 * 256 + 2 * 16**2)
    for kind, extra in (("miss", rows), ("first", rows), ("hit", 0)):
        assert (long[kind] - short[kind]) / 1024 == pair_slope(kind, options) + extra, kind


@pytest.mark.slow
def test_command(tmp_path, capsys):
    tiny = "--window 64 --context 32 --hidden 0 --layers 2 --heads 2 --head_dim 8 --vocabulary 11"
    picture = tmp_path / "operations.png"
    main(["--lengths", "1024", "2048", *tiny.split(), "--picture", str(picture)])
    *rows, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [row["tokens"] for row in rows] == [1024, 2048]
    assert last["lines"]["hit"]["slope"] == pytest.approx(2 * 16)
    assert picture.stat().st_size > 5_000
