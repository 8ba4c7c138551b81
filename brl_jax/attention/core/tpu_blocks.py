"""The lists that the TPU kernel for blocks takes for patterns that have no empty blocks but after the queries."""

from __future__ import annotations

from typing import Any

#: Rows in a block. The lists name (T / 512) (S / 512) / 2 pairs where a call is causal: 4 KiB for 16,384 tokens and
#: 257 KiB for 131,072, of a scalar memory of 1 MiB.
_BLOCK = 512


def all_blocks(queries: int, keys: int, is_causal: bool, offset: Any) -> dict[str, Any]:
    """Options of the kernel: its blocks, without those of keys after the queries where the call is causal at a known
    offset (None for an unknown one)."""
    block_q, block_k = (min(_BLOCK, -(-length // 128) * 128) for length in (queries, keys))
    lists = []
    for row in range(-(-queries // block_q)):
        known = is_causal and offset is not None
        stop = min((row + 1) * block_q, queries) + offset if known else keys
        lists.append(range(-(-max(min(stop, keys), 0) // block_k)))
    return {"key_blocks": lists, "block_q": block_q, "block_k": block_k}
