"""Tables of BRL-Attention (OpenReview Vpyg3fqXbl). Those of the Long Range Arena are in `lra.py`."""

from __future__ import annotations

from eval.tasks.paper_tables.table import PERPLEXITIES, VALIDATION_LOSS, PaperTable

_PAPER = "BRL-Attention (OpenReview Vpyg3fqXbl)"

TABLES = {
    "brl-3": PaperTable(
        f"{_PAPER}, table 3, WikiText-103; its other rows are TransNormer's table 4",
        "lm",
        PERPLEXITIES,
        {
            "Transformer (our-imp)": ("wikitext103-full", 21.31, 22.03),
            "Local-Attention (our-imp)": ("wikitext103-local", 22.08, 23.74),
            "BRL-Former": ("wikitext103-brl-paper-128", 20.56, 22.11),
        },
    ),
    "brl-7": PaperTable(
        f"{_PAPER}, figure 7, WikiText-103: curves, without numbers in the text",
        "lm",
        VALIDATION_LOSS,
        {
            "full": ("wikitext103-full", None),
            "local, w = 64": ("wikitext103-local-64", None),
            "local, w = 128": ("wikitext103-local", None),
            "BRL, w = m = 64, lambda 0.5": ("wikitext103-brl-paper-64", None),
            "lambda 0.1": ("wikitext103-brl-paper-64-lambda-0.1", None),
            "lambda 0.2": ("wikitext103-brl-paper-64-lambda-0.2", None),
            "lambda 1": ("wikitext103-brl-paper-64-lambda-1", None),
            "beta 0": ("wikitext103-brl-paper-64-beta-0", None),
            "BRL, w = m = 128": ("wikitext103-brl-paper-128", None),
            "gamma 0": ("wikitext103-brl-paper-128-gamma-0", None),
        },
    ),
    "brl-10": PaperTable(
        f"{_PAPER}, figure 10, OpenWebText: curves, without numbers in the text",
        "lm",
        VALIDATION_LOSS,
        {
            "full": ("openwebtext-full", None),
            "local, w = 128": ("openwebtext-local-128", None),
            "local, w = 256": ("openwebtext-local", None),
            "BRL, w = m = 128": ("openwebtext-brl-paper-128", None),
            "BRL, w = m = 256": ("openwebtext-brl-paper", None),
        },
    ),
}
