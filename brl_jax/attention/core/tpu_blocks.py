"""Lists for the TPU's block kernel that contain all blocks, except those after the queries of a causal call."""

from __future__ import annotations

from typing import Any

#: Rows in a block. The lists of a causal call name (T / 512) (S / 512) / 2 pairs: 4 KiB for 16,384 tokens and 257 KiB
#: for 131,072, out of 1 MiB of scalar memory.
BLOCK = 512


def all_blocks(
    queries: int, keys: int, is_causal: bool, offset: Any, *, block_q: int = BLOCK
) -> dict[str, Any]:
    """The kernel's options: all pairs of blocks. If the call is causal and its offset is static (not None), blocks of
    keys after the queries are left out."""
    block_q, block_k = (
        min(size, -(-length // 128) * 128) for size, length in ((block_q, queries), (BLOCK, keys))
    )
    lists = []
    for row in range(-(-queries // block_q)):
        known = is_causal and offset is not None
        stop = min((row + 1) * block_q, queries) + offset if known else keys
        lists.append(range(-(-max(min(stop, keys), 0) // block_k)))
    return {"key_blocks": lists, "block_q": block_q, "block_k": block_k}
