"""Which cases of tests a sample runs."""

import types

import pytest

from tests import conftest
from tests.support.sampling import left_out


def item(nodeid, group=None):
    marks = {"xdist_group": pytest.mark.xdist_group(group).mark} if group else {}
    return types.SimpleNamespace(nodeid=nodeid, get_closest_marker=marks.get)


NAMES = [f"mechanism {i}" for i in range(20)]
ITEMS = [
    item("test_a.py::test_alone"),
    *(item(f"test_a.py::test_many[{i}]") for i in range(9)),
    *(item(f"test_a.py::test_ring[{i}]", group="devices") for i in range(9)),
    *(item(f"test_laws.py::test_law_{law}[{name}]@{name}", group=name) for law in (1, 2) for name in NAMES),
]


def kept(seed, cases=3):
    others = {x.nodeid for x in left_out(ITEMS, cases, seed)}
    return [x.nodeid for x in ITEMS if x.nodeid not in others]


def test_each_test_keeps_as_many_cases():
    functions = [name.partition("[")[0].partition("::")[2] for name in kept("a")]
    counts = {name: functions.count(name) for name in functions}
    assert counts == {"test_alone": 1, "test_many": 3, "test_ring": 3, "test_law_1": 3, "test_law_2": 3}


def test_a_fraction_keeps_one_case_of_that_share_of_the_functions():
    many = [item(f"test_b.py::test_{i}[{case}]") for i in range(400) for case in range(3)]
    others = {x.nodeid for x in left_out(many, 0.5, "a")}
    functions = [x.nodeid.partition("[")[0] for x in many if x.nodeid not in others]
    assert len(functions) == len(set(functions))
    assert 150 < len(functions) < 250


def test_laws_choose_the_same_mechanisms_and_a_ring_is_not_one():
    laws = [{name.partition("@")[2] for name in kept("a") if f"law_{law}" in name} for law in (1, 2)]
    assert laws[0] == laws[1]
    assert len({tuple(x for x in kept(str(seed)) if "ring" in x) for seed in range(5)}) > 1


def test_a_week_repeats_its_choice_and_weeks_see_all():
    assert kept("a") == kept("a")
    seen = set().union(*(kept(str(seed)) for seed in range(60)))
    assert seen == {x.nodeid for x in ITEMS}


@pytest.mark.parametrize(
    ("asked", "source", "keyword", "cases"),
    [
        (None, "TESTPATHS", "", 0.6),
        (2, "TESTPATHS", "", 2),
        (0, "TESTPATHS", "", 0),
        (None, "ARGS", "", 0),
        (None, "TESTPATHS", "laws", 0),
    ],
)
def test_a_run_of_the_whole_suite_is_a_sample(asked, source, keyword, cases):
    option = types.SimpleNamespace(cases=asked, keyword=keyword, markexpr="not slow")
    conftest.pytest_configure(
        types.SimpleNamespace(option=option, args_source=pytest.Config.ArgsSource[source])
    )
    assert option.cases == cases
