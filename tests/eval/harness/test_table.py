"""Tables as Markdown, and the numbers in their cells."""

import pytest

from eval.harness.groups import alike
from eval.harness.table import Table, mean_deviation, mean_range, percent, plus_minus, seeds


def test_a_table_is_markdown():
    table = Table("run", "loss", title="Losses:")
    table.add("a", 0.5)
    table.add("b", None)
    assert str(table) == "Losses:\n\n| run | loss |\n|---|---|\n| a | 0.5 |\n| b | - |"
    with pytest.raises(AssertionError):
        table.add("c")


def test_on_a_terminal_rows_of_one_length_stay_together(capsys):
    table = Table("n", "case", "ms")
    for n, name in ((64, "full"), (64, "local"), (128, "full")):
        table.add(n, name, "1.5")
    drawn = table.for_terminal(left=2, sections=True)
    assert [column.justify for column in drawn.columns] == ["left", "left", "right"]
    assert [row.end_section for row in drawn.rows] == [False, True, False]
    table.show()  # stdout is not a terminal here
    assert capsys.readouterr().out.startswith("| n | case | ms |")


def test_numbers_of_cells():
    assert mean_range([1.0]) == "1.000"
    assert mean_range([1.0, 2.0, 6.0], 1) == "3.0 (1.0 to 6.0)"
    assert percent([0.25, 0.75]) == "50.0 (25.0 to 75.0)"
    assert mean_deviation([2.0]) == (2.0, 0.0, 1)
    # Deviations -1, -1, 2: the sum of squares is 6, over 2 degrees of freedom.
    assert mean_deviation([1.0, 1.0, 4.0]) == (2.0, pytest.approx(3**0.5), 3)
    assert [plus_minus(39.215, 0.0, count, 1) for count in (1, 2)] == ["39.2", "39.2 ± 0.0"]
    assert seeds([{"seed": 0}, {"seed": 3}]) == "0, 3"


def test_groups_name_the_settings_in_which_they_differ():
    settings = ({"model.dim": None, "data.folder": ""}, {"model.dim": 4, "data.folder": ""}, {"model.dim": 4})
    results = [{"model": "a", "configuration": each} for each in settings]
    assert list(alike(results, lambda result: result["model"])) == [
        "a, dim none, folder none",
        "a, dim 4, folder none",
        "a, dim 4",
    ]
