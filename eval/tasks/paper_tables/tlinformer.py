"""Table 1 of TLinFormer (arXiv:2508.20407)."""

from __future__ import annotations

from eval.tasks.paper_tables.table import PaperTable

# After ten epochs.
_FIGURES = {
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

TABLES = {
    "tlinformer-1": PaperTable(
        "TLinFormer (arXiv:2508.20407), table 1, WikiText-103, after ten epochs",
        "lm",
        {"PPL (val)": "val_perplexity"},
        {name: (f"wikitext103-tlinformer-{name}", figure) for name, figure in _FIGURES.items()},
    )
}
