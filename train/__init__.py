import importlib.util
import signal
import sys


def _command() -> str | None:
    """The module, if this is imported for `python -m train.NAME` or `python -m eval.NAME`, before the module itself."""
    given = sys.orig_argv
    named = given[given.index("-m") + 1 :] if "-m" in given else []
    is_ours = bool(named) and named[0].partition(".")[0] in ("train", "eval")
    return named[0] if sys.argv[:1] == ["-m"] and is_ours else None


def _check_extra(command: str) -> None:
    """Ends the process with one line where the extra `train` is not installed; an import would print a traceback."""
    for name in (
        "optax",
        "orbax",
        "grain",
        "etils",
        "docstring_parser",
        "tyro",
        "rich",
        "tensorboardX",
        "tokenizers",
        "matplotlib",
        "PIL",
    ):
        if importlib.util.find_spec(name) is None:
            print(f"{command}: the module {name} is missing: pip install -e '.[train]'", file=sys.stderr)
            raise SystemExit(2)


if (_name := _command()) is not None:
    _check_extra(_name)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C during the seconds of the imports ends the process at once. An exception there would print a traceback,
        # or be ignored inside a garbage collection. `train.cli.command.command` sets Python's handler again.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
