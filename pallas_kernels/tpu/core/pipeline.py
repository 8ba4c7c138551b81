"""Software pipelining of the unrolled work inside a kernel."""

from __future__ import annotations


def pipelined(units: int, *stages) -> None:
    """Runs stage t of unit u beside stage t + 1 of unit u - 1, which gives the scheduler independent work to
    interleave.

    The compiler keeps close to program order, so that a unit which ran from start to end alone would leave the matrix
    units idle during its softmax.

    Args:
      units: how many units of work there are.
      stages: functions of the unit's number and of what the stage before returned for this unit, a tuple.
    """
    waiting: list[dict[int, tuple]] = [{} for _ in stages]
    for step in range(units + len(stages) - 1):
        for number in (0, *range(len(stages) - 1, 0, -1)):
            unit = step - number
            if 0 <= unit < units:
                out = stages[number](unit, *(waiting[number].pop(unit) if number else ()))
                if number + 1 < len(stages):
                    waiting[number + 1][unit] = out
