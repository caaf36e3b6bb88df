"""Merging of adapters into their weights."""

from collections.abc import Callable
from typing import Any, overload

from .._jax import typed
from ..arrays import is_quantized, LoraArray, quantize, QuantizedArray
from ..formats import as_format, Format
from ..trees import Choice, replace_chosen, Report, row_of, Site, sites, Tree


@overload
def merge_lora(model: Tree, format: None = None) -> Tree: ...


@overload
def merge_lora(model: Tree, format: Format | str) -> tuple[Tree, Report]: ...


@typed
def merge_lora(model: Any, format: Format | str | None = None) -> Any:
    """Add each adapter to its weight.

    A merge cannot be undone. To train further, keep the model with adapters, which does
    not change.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        model = eqquant.quantize_tree(model, "nf4")
        model = eqquant.lora_tree(model, 8, key=jax.random.key(1))
        merged = eqquant.merge_lora(model)
        assert merged.layers[0].weight.dtype == jax.numpy.float32
        requantized, report = eqquant.merge_lora(model, "nf4")
        print(report)  # The error of requantization.
        assert requantized.layers[0].weight.format == eqquant.NF4()
        ```

    **Arguments:**

    - `model`: a pytree with adapters.
    - `format`: `None` to merge into floating point, in the dtype of the weight. A
        format, or the name of one, quantizes the sums again, along the axes that the
        adapters contract.

    **Returns:**

    A pytree of the same type, with a plain array in place of every
    [`eqquant.arrays.LoraArray`][]. With a format, a pair: the pytree with an
    [`eqquant.QuantizedArray`][] in place of each, and an [`eqquant.trees.Report`][] of
    the errors of requantization, relative to the floating-point sums. Quantized arrays
    without an adapter, such as embeddings, stay quantized: use
    [`eqquant.dequantize_tree`][] to decode them.

    **Raises:**

    `ValueError` if the model contains no adapter, for example after a merge.
    """
    choices = [
        Choice(i, site.path, None, site.leaf.in_axes)
        for i, site in enumerate(sites(model))
        if isinstance(site.leaf, LoraArray)
    ]
    if not choices:
        raise ValueError(
            "merge_lora: model has no adapters: they are merged already, or "
            "eqquant.lora_tree never added any."
        )
    if format is None:
        merge: Callable = lambda leaf, _: leaf.dequantize()
        return replace_chosen(merge, model, choices, caller="merge_lora")

    format = as_format(format, "merge_lora")
    rows = []

    def requantize(leaf: LoraArray, choice: Choice):
        merged = leaf.dequantize()
        quantized = quantize(merged, format, axis=choice.axis)
        if isinstance(leaf.base, QuantizedArray) and leaf.base.axes == quantized.axes:
            quantized = quantized.with_plan(leaf.base.plan)
        if is_quantized(leaf.base):
            quantized = quantized.with_static(compute=leaf.base.compute)
        rows.append(row_of(Site(choice.path, quantized, None, "", False), merged))
        return quantized

    out = replace_chosen(requantize, model, choices, caller="merge_lora")
    return out, Report(tuple(rows))
