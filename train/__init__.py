import signal
import sys


def _is_command() -> bool:
    """Whether this is imported for `python -m train.NAME` or `python -m eval.NAME`, before the command itself."""
    given = sys.orig_argv
    named = given[given.index("-m") + 1 :] if "-m" in given else []
    return sys.argv[:1] == ["-m"] and bool(named) and named[0].partition(".")[0] in ("train", "eval")


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during the seconds of the imports ends the process at once. An exception there would print a traceback, or
    # be ignored inside a garbage collection. `train.cli.command.command` sets Python's handler again.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
