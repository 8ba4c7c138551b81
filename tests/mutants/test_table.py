"""The table of mutants fits the code that it would break."""

from tests.mutants.__main__ import ROOT, places
from tests.mutants.table import MUTANTS


def test_each_mutant_has_one_place_and_tests():
    assert [mutant.name for mutant in MUTANTS if places(mutant) != 1] == []
    files = {(mutant.name, test) for mutant in MUTANTS for test in mutant.tests if "/" in test}
    assert [name for name, test in files if not (ROOT / test.split("::")[0]).exists()] == []
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
