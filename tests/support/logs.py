"""Reads the metrics that a run has written."""

import json

TIMED = ("tokens_per_second", "tokens_per_second_per_device", "input_wait", "goodput", "mfu")


def metrics_lines(workdir):
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def measured_lines(workdir):
    """The same without what the machine's speed decides."""
    return [{name: x for name, x in line.items() if name not in TIMED} for line in metrics_lines(workdir)]
