"""How far back a network's windows see without compressed tokens."""

from __future__ import annotations

from collections.abc import Sequence

from brl_jax.attention.local.patterns import SlidingWindow
from brl_jax.layers import BRLConfig, LocalConfig, Mechanism
from brl_jax.layers.core.side_by_side import SideBySideConfig


def window_reach(mechanisms: Sequence[Mechanism], length: int, is_causal: bool = True) -> int:
    """The distance in tokens beyond which layers of sliding windows pass nothing on (BRL-Attention, OpenReview
    Vpyg3fqXbl, proposition 2.2), without what BRL's compressed tokens add; `length` - 1 if a layer has no window."""

    def of_layer(mechanism: Mechanism) -> int:
        if isinstance(mechanism, SideBySideConfig):
            return max(map(of_layer, mechanism.both.values()))
        local = mechanism.local if isinstance(mechanism, BRLConfig) else mechanism
        if not isinstance(local, LocalConfig) or local.pattern != "sliding":
            return length - 1
        window = SlidingWindow.of_width(local.window, is_causal)
        return max(window.left, window.right)

    return min(sum(map(of_layer, mechanisms)), length - 1)
