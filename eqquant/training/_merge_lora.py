"""Adding adapters to their weights."""

from collections.abc import Callable
from typing import Any, overload

from .._jax import typed
from ..arrays import LoraArray, quantize
from ..formats import as_format, Format
from ..trees import Choice, replace_chosen, Report, row_of, Site, sites, Tree


@overload
def merge_lora(model: Tree, format: None = None) -> Tree: ...


@overload
def merge_lora(model: Tree, format: Format | str) -> tuple[Tree, Report]: ...


@typed
def merge_lora(model: Any, format: Format | str | None = None) -> Any:
    """Add each adapter to its weight.

    There is no way back from a merged model: to train on, or to unmerge, keep the one
    with adapters. Nothing of it is changed.

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
        print(report)  # what requantizing costs
        assert requantized.layers[0].weight.format == eqquant.NF4()
        ```

    **Arguments:**

    - `model`: a pytree with adapters.
    - `format`: `None` to merge into floating point, of the dtype of the weight. A
        format, or the name of one, to quantize the sums again, along the axes that the
        adapters contract.

    **Returns:**

    A pytree of the same type, in which every [`eqquant.LoraArray`][] is a plain array.
    Quantized arrays without an adapter, as those of embeddings, stay quantized: see
    [`eqquant.dequantize_tree`][].
    With a format every one is a [`eqquant.QuantizedArray`][], and beside the pytree
    comes a [`eqquant.Report`][] of them: the error that quantizing again adds, relative
    to the sum in floating point.

    **Raises:**

    `ValueError` if there is no adapter: if it was merged already.
    """
    choices = [
        Choice(i, site.path, None, site.leaf.in_axes, site.leaf.in_axes, None)
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

    format = as_format(format)
    rows = []

    def requantize(leaf: LoraArray, choice: Choice):
        merged = leaf.dequantize()
        quantized = quantize(merged, format, axis=choice.axis)
        rows.append(row_of(Site(choice.path, quantized, None, "", False), merged))
        return quantized

    out = replace_chosen(requantize, model, choices, caller="merge_lora")
    return out, Report(tuple(rows))
