"""The weight with an adapter."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import wadler_lindig as wl
from jaxtyping import Array, Float

from .. import _plain as plain
from .._contraction import Contraction
from .._implicit import is_implicit, stored
from ._adapter import add_adapter, contract_adapter
from ._structure import AbstractLoraArray


@stored
class LoraArray(AbstractLoraArray):
    """A weight and a low-rank adapter: `base + scale * b @ a` (LoRA, arXiv 2106.09685).

    The sum is never formed: a product is `base @ x + scale * b @ (a @ x)`. A layer can
    multiply, index or transpose it without a wrapper. All other operations need
    [`eqquant.quaxify`][]. It is a pytree whose leaves have the leading axes of the
    weight, so that layers can be stacked.

    Make one with [`eqquant.lora_tree`][], not by calling the class.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        layer = eqx.nn.Linear(64, 32, key=jax.random.key(0))
        quantized = eqquant.quantize_tree(layer, "nf4")
        adapted = eqquant.lora_tree(quantized, 4, key=jax.random.key(1)).weight
        assert isinstance(adapted, eqquant.arrays.LoraArray)
        assert adapted.a.shape == (4, 64) and adapted.b.shape == (32, 4)
        ```

    **Fields:**

    - `base`: the weight, quantized or floating point.
    - `a`: `(*lead, rank, *in)`, where `in` are the axes that the layer contracts.
    - `b`: `(*lead, *out, rank)`. Both may be in low precision.
    - `key`: `(*lead)`, the key of the dropout; `None` for no dropout. See
        [`eqquant.training.with_dropout_key`][].
    - `scale`: the factor of the adapter, `alpha / rank`.
    - `dropout`: the dropout rate of the activation at the input of the adapter.
    - `in_axes`, `out_axes`: the axes `in` and `out` of the weight, counted from its
        end, in order.
    """

    def dequantize(self) -> Float[Array, "..."]:
        """Return the sum of base and adapter, in floating point."""
        base = self.base.dequantize() if is_implicit(self.base) else self.base
        return add_adapter(self, base)

    @property
    def rounds_activations(self) -> bool:
        return is_implicit(self.base) and self.base.rounds_activations

    def contract(self, x, contraction: Contraction) -> Any:
        out_dtype = contraction.result_dtype(self, x)
        if not jnp.issubdtype(out_dtype, jnp.floating):
            return NotImplemented
        contraction = dataclasses.replace(contraction, out_dtype=out_dtype)
        out = plain.contract(self.base, x, contraction)
        if out is NotImplemented:
            return NotImplemented
        return out + contract_adapter(self, x, contraction).astype(out_dtype)

    def __pdoc__(self, **kwargs):
        if not self.is_whole:  # A pytree with other leaves, such as specs.
            parts = [wl.pdoc(x, **kwargs) for x in (self.base, self.a, self.b)]
            return (
                wl.TextDoc("lora(") + wl.join(wl.TextDoc(", "), parts) + wl.TextDoc(")")
            )
        base = wl.pdoc(self.base, **kwargs)
        return wl.TextDoc(f"lora[rank={self.rank}](") + base + wl.TextDoc(")")
