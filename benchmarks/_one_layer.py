"""One layer of a decoder at a time, for methods that quantize layers in order."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Int


def layer_by_kind(decoder: Any, length: int) -> tuple[Callable, list[int]]:
    """Return the function of a layer, and the kind of attention of each layer: 0 is
    global, and 1 is local.

    The kind is an array, so that layers of both kinds share a compiled program.
    """
    views = decoder._views(length, length, 0, None)

    def forward(
        layer: Any, x: Float[Array, "rows length size"], kind: Int[Array, ""]
    ) -> Float[Array, "rows length size"]:
        view = jax.tree.map(lambda x: x[kind], views)
        return layer(x, view, None, None, 0, None)[0]

    config = decoder.config
    return forward, list(map(int, config.local)) or [0] * config.layers
