"""The table of docs/packing.md says of each listed mechanism whether it packs."""

import re
from pathlib import Path

from brl_jax.layers import MECHANISMS

PAGE = Path(__file__).parents[2] / "docs" / "packing.md"


def test_the_table_of_mechanisms_that_pack():
    rows = re.findall(r"^\| (`[^|]+) \| (yes|no) \|", PAGE.read_text(), re.MULTILINE)
    said = {name: packs == "yes" for names, packs in rows for name in re.findall(r"`(\w+)`", names)}
    packs = {name: config().packs for name, config in MECHANISMS.items()}
    assert said == {name: packs[name] for name in said}
    assert {
        name for name in packs if packs[name]
    } <= said.keys()  # those left out are the table's "all others"
