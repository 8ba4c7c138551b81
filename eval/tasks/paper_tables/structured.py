"""Figures of structured-matrix attention (arXiv:2509.07963)."""

from __future__ import annotations

from eval.tasks.paper_tables.table import VALIDATION_LOSS, PaperTable

_PAPER = "Structured-matrix attention (arXiv:2509.07963)"
_MIXERS = {
    "MLR attention": "mlr",
    "standard attention": "full",
    "sliding windows": "local",
    "heads split in two": "global-window",
    "alternating layers": "alternate",
}

TABLES = {
    "mlr-3": PaperTable(
        f"{_PAPER}, figures 2, 3 and 8 to 12, in-context regression: curves, without numbers in the text",
        "regression",
        {"squared error": "test_error"},
        {
            f"{name}, {inputs} inputs, width {width}": (f"paper-{name}-{inputs}-{width}", None)
            for name in ("full-8", "full-1", "btt-8", "mlr-8")
            for inputs in (16, 32, 64, 128)
            for width in (32, 64, 128, 256)
        },
    ),
    "mlr-4": PaperTable(
        f"{_PAPER}, figures 4 and 14, OpenWebText: curves, without numbers in the text",
        "lm",
        VALIDATION_LOSS,
        {
            f"{row}, width {width}": (f"owt-chars-{name}-{width}", None)
            for width in (256, 384, 512, 768)
            for row, name in _MIXERS.items()
        },
    ),
}
