"""The tables of the papers, each row with the preset that trains it."""

from collections.abc import Mapping

from eval.tasks.paper_tables import brl, bsbr, tlinformer, transnormer
from eval.tasks.paper_tables.table import PaperTable

TABLES: Mapping[str, PaperTable] = {
    **brl.TABLES,
    **transnormer.TABLES,
    **tlinformer.TABLES,
    **bsbr.TABLES,
}
