"""Reads the metrics that a run has written."""

import json


def metrics_lines(workdir, names=None):
    """The lines of a run's metrics; with `names`, only those fields of each."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    if names is None:
        return lines
    return [{name: line[name] for name in names if name in line} for line in lines]
