"""A run that a signal stops and that then resumes."""

import signal

import pytest

from train.engine.errors import Stopped


def stop_and_go_on(monkeypatch, stream, run):
    """Runs until a signal arrives during the fetch of a stream's fifth batch, then resumes to the end of six steps."""
    take = stream.__next__

    def stopping(self):
        if self.get_state()["step"] == 4:
            signal.raise_signal(signal.SIGTERM)
        return take(self)

    monkeypatch.setattr(stream, "__next__", stopping)
    with pytest.raises(Stopped, match="after step 5 of 6"):
        run()
    monkeypatch.setattr(stream, "__next__", take)
    run()
