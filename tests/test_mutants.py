"""`python -m tests.mutants` on a small tree."""

import subprocess

import pytest

from tests import mutants

CODE = '''"""Text."""

STEP = 2


def clipped(x: float, low: int = 0) -> float:
    """From low to STEP."""
    if x < low:
        raise ValueError(f"{x} < {low}")
    return min(x, STEP)
'''
TEST = """import pytest

from room import code


def test_clipped():
    assert [code.clipped(x) for x in (0, 1, 3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="-1 < 0"):
        code.clipped(-1)
"""


def tree(root, test):
    for name, text in {"room/code.py": CODE, "tests/room/test_code.py": test, "pyproject.toml": ""}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)


def test_draws_from_the_syntax_tree():
    found = [(m.line, m.old, m.new, m.imported) for m in mutants.mutants_of("room/code.py", CODE)]
    assert found == [
        (3, "2", "(3)", True),
        (3, "2", "(1)", True),
        (6, "0", "(1)", True),
        (6, "0", "(-1)", True),
        (8, "x < low", "(x <= low)", False),
        (9, 'raise ValueError(f"{x} < {low}")', "pass", False),
        (10, "min(x, STEP)", "min(STEP, x)", False),
        (10, "min", "max", False),
    ]


def test_lists_what_lives(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # starting them takes longer than the tests
    tree(tmp_path, TEST.partition("    with")[0])
    assert mutants.main(["room/code.py", "--count", "2", "--seed", "24"], tmp_path) == 1
    first, killed, lives, last = capsys.readouterr().out.splitlines()
    assert first == "2 mutants; 1 tests"
    assert "killed  room/code.py:6  0  ->" in killed
    assert lives.endswith(
        'LIVES, no test runs it:  room/code.py:9  raise ValueError(f"{x} < {low}")  ->  pass'
    )
    assert last == "1 of 2 live (seed 24)"
    assert (tmp_path / "room/code.py").read_text() == CODE


def test_the_tests_must_pass_first(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    tree(tmp_path, TEST.replace("[0, 1, 2]", "[0, 1, 3]"))
    with pytest.raises(SystemExit, match="the tests fail without a mutant"):
        mutants.main(["room"], tmp_path)


def test_finds_the_tests_of_a_room():
    assert mutants.mirror_of(["train/data", "train/data/shards.py"]) == ["tests/train/data"]
    calls = "tests/bad_input/test_calls.py"
    assert mutants.mirror_of(["brl_jax/decoding.py"]) == [calls, "tests/test_decoding.py"]
    assert mutants.mirror_of(["brl_jax/attention/dense"]) == ["tests/attention/dense", calls, "tests/laws"]
