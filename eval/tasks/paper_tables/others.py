"""Structured-matrix attention (arXiv:2509.07963), table 1 of TLinFormer (arXiv:2508.20407), and sweeps of the BSBR
article, which prints no figures."""

from __future__ import annotations

from eval.tasks.paper_tables.table import VALIDATION_LOSS, PaperTable

_STRUCTURED = "Structured-matrix attention (arXiv:2509.07963)"
_MIXERS = {
    "MLR attention": "mlr",
    "standard attention": "full",
    "sliding windows": "local",
    "heads split in two": "global-window",
    "alternating layers": "alternate",
}
# Perplexities after ten epochs.
_TLINFORMER = {
    "base-1k": 22.5,
    "1k-512-0.5": 23.0,
    "1k-1k-0.5": 22.7,
    "base-2k": 29.5,
    "2k-512-0.5": 30.9,
    "2k-2k-0.5": 29.8,
    "base-512": 21.6,
    "512-512-0.382": 21.9,
    "512-512-0.5": 21.9,
    "512-512-0.618": 21.9,
}
_SIZES = (16, 32, 64, 128, 256)

TABLES = {
    "mlr-3": PaperTable(
        f"{_STRUCTURED}, figures 2, 3 and 8 to 12, in-context regression: curves, without numbers in the text",
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
        f"{_STRUCTURED}, figures 4 and 14, OpenWebText: curves, without numbers in the text",
        "lm",
        VALIDATION_LOSS,
        {
            f"{row}, width {width}": (f"owt-chars-{name}-{width}", None)
            for width in (256, 384, 512, 768)
            for row, name in _MIXERS.items()
        },
    ),
    "tlinformer-1": PaperTable(
        "TLinFormer (arXiv:2508.20407), table 1, WikiText-103, after ten epochs",
        "lm",
        {"PPL (val)": "val_perplexity"},
        {name: (f"wikitext103-tlinformer-{name}", figure) for name, figure in _TLINFORMER.items()},
    ),
    "bsbr-chunks": PaperTable(
        'BSBR article, "Chunk size optimization": chunks of 32 to 128 tokens are best',
        "lm",
        VALIDATION_LOSS,
        {f"{size} tokens": (f"bsbr-chunk-{size}", None) for size in _SIZES},
    ),
    "bsbr-compression": PaperTable(
        'BSBR article, "State compression tradeoffs": up to 4 times costs little',
        "lm",
        VALIDATION_LOSS,
        {
            "whole": ("bsbr-chunk-64", None),
            "whole, the parameters of 4 times": ("bsbr-wide", None),
            "2 times": ("bsbr-compressed-2", None),
            "4 times": ("bsbr-compressed-4", None),
        },
    ),
}
