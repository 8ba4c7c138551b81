"""Software pipelining of the unrolled work inside a kernel."""

from __future__ import annotations


def pipelined(units: int, *stages) -> None:
    """Runs stage t of unit u together with stage t + 1 of unit u - 1, which gives the scheduler independent work to
    interleave.

    The compiler stays close to program order, so running each unit from start to end would leave the matrix units idle
    during its softmax.

    Args:
      units: the number of units of work.
      stages: functions of the unit's number and of the tuple that the previous stage returned for this unit.
    """
    waiting: list[dict[int, tuple]] = [{} for _ in stages]
    for step in range(units + len(stages) - 1):
        for number in (0, *range(len(stages) - 1, 0, -1)):
            unit = step - number
            if 0 <= unit < units:
                out = stages[number](unit, *(waiting[number].pop(unit) if number else ()))
                if number + 1 < len(stages):
                    waiting[number + 1][unit] = out
