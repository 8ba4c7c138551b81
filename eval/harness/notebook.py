"""Training in a notebook: what `python -m train.NAME` does, under a bar and a picture that grows.

    curves = Curves({"val_accuracy": ""}, ylabel="accuracy on new rows")
    run = trained(RECALL, config, curves, "full")

The package IPython draws the bar and the picture; it is there wherever a notebook runs.
"""

from __future__ import annotations

import dataclasses
import html
import io
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from eval.harness.pictures import line_styles
from eval.harness.runs import Run, open_run
from train.cli.main import run_task
from train.engine.metrics import clock, silent
from train.tasks.task import Task

# A picture takes a quarter of a second of a core.
_SECONDS_BETWEEN_PICTURES = 5.0
_SECONDS_BETWEEN_BARS = 0.5


def png(figure: Figure) -> Any:
    """A figure as an object that a notebook shows if it is the last value of a cell."""
    from IPython.display import Image

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return Image(file.getvalue())


class _Slot:
    """A place in a cell's output whose content can be replaced."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, content: Any) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(content, display_id=True)
        else:
            self._handle.update(content)


class Curves:
    """A picture of one or more metrics of several runs, which grows while they train.

    Args:
      metrics: the fields of metrics.jsonl to draw, each with a name for the legend ("" where there is one alone).
      ylabel: of the picture.
      level: (value, name) of a horizontal line, such as the accuracy of guessing.
      ylim: of the picture; by default whatever the values need.

    Attributes:
      points: the (step, value) pairs of each curve, by its name in the legend.
      folder: where the runs are; it lives as long as this object.
    """

    def __init__(
        self,
        metrics: Mapping[str, str],
        *,
        ylabel: str,
        level: tuple[float, str] | None = None,
        ylim: tuple[float, float] | None = None,
    ):
        self._metrics, self._ylabel, self._level, self._ylim = metrics, ylabel, level, ylim
        self.points: dict[str, list[tuple[int, float]]] = {}
        self._measured: set[str] = set()
        self._steps = 1
        self._bar, self._picture = _Slot(), _Slot()
        self._drawn = 0.0
        self.folder = Path(tempfile.mkdtemp(prefix="brl-jax-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def report(self, label: str, steps: int) -> _Report:
        """Returns a `train.engine.metrics.RunReport` that draws a run with this label and number of steps."""
        self._steps = max(self._steps, steps)
        return _Report(self, label, steps)

    def bar(self, text: str, done: int, steps: int) -> None:
        """Shows how far the run that trains now is."""
        from IPython.display import HTML

        bar = f'<progress value="{done}" max="{steps}" style="width: 20em"></progress>'
        self._bar.show(HTML(f"{bar} {html.escape(text)}"))

    def add(self, label: str, line: Mapping[str, Any]) -> None:
        """Adds the metrics of a step, and draws them if the last picture is some seconds old."""
        for field, name in self._metrics.items():
            if field in line:
                curve = ", ".join(filter(None, (label, name)))
                self.points.setdefault(curve, []).append((line["step"], line[field]))
                if field.startswith("val_"):
                    self._measured.add(curve)
        if time.monotonic() - self._drawn > _SECONDS_BETWEEN_PICTURES:
            self.draw()

    def draw(self) -> None:
        """Draws every point so far."""
        self._picture.show(png(self.figure()))
        self._drawn = time.monotonic()

    def figure(self) -> Figure:
        """The picture."""
        figure = Figure(figsize=(7.5, 3.8), layout="constrained")
        axes = figure.subplots()
        styles = line_styles(list(self.points))
        for curve, points in self.points.items():
            # Training logs many noisy values, and evaluation few.
            shown = {"markersize": 5} if curve in self._measured else {"marker": "", "linewidth": 0.8}
            axes.plot(*zip(*points), label=curve, **{**styles[curve], **shown})
        if self._level is not None:
            value, name = self._level
            axes.axhline(value, color="#999999", linestyle="--", linewidth=1, label=name)
        axes.set(xlabel="step", ylabel=self._ylabel, xlim=(0, self._steps), ylim=self._ylim)
        axes.grid(True, alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        return figure


class _Report:
    """Shows one run in a `Curves`."""

    def __init__(self, curves: Curves, label: str, steps: int):
        self._curves, self._label, self._steps = curves, label, steps
        self._done, self._text, self._shown = 0, "compiling", 0.0

    def __enter__(self) -> _Report:
        self._began = time.monotonic()
        self._show(self._text)
        return self

    def __exit__(self, *exception: object) -> None:
        self._show(f"{self._text}, {clock(time.monotonic() - self._began)} in all")
        self._curves.draw()

    def _show(self, text: str) -> None:
        self._curves.bar(f"{self._label}: {text}", self._done, self._steps)
        self._shown = time.monotonic()

    def step(self, line: Mapping[str, Any]) -> None:
        self._done = line["step"]
        self._text = f"step {self._done} of {self._steps}, loss {line['loss']:.3f}"
        if time.monotonic() - self._shown > _SECONDS_BETWEEN_BARS:
            self._show(self._text)
        self._curves.add(self._label, line)

    def busy(self, note: str) -> None:
        self._show(f"{self._text}, {note}")


def trained(task: Task[Any, Any], config: Any, curves: Curves, label: str) -> Run:
    """Trains a configuration in a folder with this label under `curves.folder`, and returns the run at its best
    checkpoint. Of its output, only the picture is shown."""
    workdir = str(curves.folder / label.replace("/", "-"))
    loop = dataclasses.replace(config.loop, workdir=workdir, tensorboard=False)
    config = dataclasses.replace(config, loop=loop)
    with silent():
        run_task(task, config, curves.report(label, loop.steps))
    return open_run([task], workdir, "best")
