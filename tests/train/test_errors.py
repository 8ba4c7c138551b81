"""How a command ends."""

import subprocess
import sys

_INTERRUPTED = """
import gc, signal, sys, time
from train.errors import command

def main(argv):
    sent = []

    def callback(phase, info):  # as JAX's, whose exceptions Python ignores
        if not sent:
            sent.append(phase)
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(callback)
    gc.collect()
    assert sent
    for _ in range(1000):
        time.sleep(0.01)

signal.signal(signal.SIGINT, signal.default_int_handler)
hook = sys.unraisablehook
status = command(main, "name")
assert sys.unraisablehook is hook
sys.exit(status)
"""


def test_an_interrupt_in_the_garbage_collector_is_not_lost():
    result = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "name: stopped\n")
