"""The table of docs/packing.md says for each listed mechanism whether it packs, in a decoder and in an encoder."""

import re
from pathlib import Path

from brl_jax.layers import MECHANISMS

PAGE = Path(__file__).parents[2] / "docs" / "packing.md"


def test_the_table_of_mechanisms_that_pack():
    rows = re.findall(r"^\| (`[^|]+) \| (yes|no) \| (yes |no |)\|", PAGE.read_text(), re.MULTILINE)
    said = {name: packs for names, *packs in rows for name in re.findall(r"`(\w+)`", names)}
    for name, (decoder, encoder) in said.items():
        mechanism = MECHANISMS[name]()
        assert mechanism.packs == (decoder == "yes"), name
        assert mechanism.packs_bidirectional == (encoder == "yes "), name
        assert mechanism.bidirectional or encoder != "yes ", name
        if decoder == "yes":
            assert mechanism.bidirectional == bool(encoder), name
    packs = {name for name, config in MECHANISMS.items() if config().packs}
    assert packs <= said.keys()  # the others are in the table's "all others"
