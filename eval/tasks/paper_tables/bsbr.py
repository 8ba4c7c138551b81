"""Sweeps of the BSBR article, which prints no figures."""

from __future__ import annotations

from eval.tasks.paper_tables.table import VALIDATION_LOSS, PaperTable

_SIZES = (16, 32, 64, 128, 256)

TABLES = {
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
