"""Quantization-aware training of whole models."""

import dataclasses
import functools as ft
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
from jax import lax
from jaxtyping import Array, Float

from .._jax import typed
from ..arrays import (
    canonical_axes,
    check_rotation,
    hadamard,
    is_implicit,
    quantize,
    QuantizedArray,
    rotated,
    RotatedArray,
)
from ..formats import Format
from ..kernels import as_compute, Compute
from ..sharding import check_spec, QuantizesLater, Split
from ..trees import Choice, choose, replace_chosen, sites, Tree
from ._straight_through import initial_parts, make_trainable, straight_through
from ._straight_through_array import straight_through_value


@typed
def fake_quantize_tree(
    model: Tree,
    format: Format | str | None = "nf4",
    *,
    where: Any = None,
    rules: Mapping | None = None,
    min_size: int = 256,
    clip: bool = False,
    quantized_products: bool = False,
    check_finite: bool = True,
    precision: str | None = None,
    activations: str | None = None,
    compute: Compute | None = None,
) -> Tree:
    """Round the weights of a model inside of a loss, with straight-through gradients.

    The weights that [`eqquant.quantize_tree`][] would quantize are replaced by their
    [`eqquant.straight_through`][] values. These are plain arrays with the same shapes
    and dtypes, and with the values of the quantized weights, bit for bit.

    With `quantized_products` or `activations="int8"`, products also equal products with
    the quantized weights. A weight is then an object with the operators of an
    [`eqquant.QuantizedArray`][], not a plain array.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))


        @eqx.filter_jit
        @eqx.filter_grad
        def gradient(model, x):
            model = eqquant.training.fake_quantize_tree(model, "ternary")
            return jnp.sum(jax.vmap(model)(x) ** 2)


        # Gradients of the float weights.
        gradients = gradient(model, jnp.ones((8, 64)))
        assert gradients.layers[0].weight.shape == (256, 64)
        ```

    **Arguments:**

    - `model`, `format`, `where`, `rules`, `min_size`, `check_finite`: as in
        [`eqquant.quantize_tree`][].
    - `clip`: as in [`eqquant.straight_through`][].
    - `quantized_products`: use the products of the quantized model. The gradient is the
        gradient of the dense product.
    - `precision`, `activations`, `compute`: as in [`eqquant.quantize_tree`][].

    **Returns:**

    A pytree of the same type.

    **Raises:**

    The errors of [`eqquant.quantize_tree`][], and `ValueError` if no weight is chosen.
    """
    caller = "fake_quantize_tree"
    compute = as_compute(compute, precision, activations)
    choices = choose(
        model, format, where=where, rules=rules, min_size=min_size, caller=caller
    )
    _check_some(choices, caller)
    settings = clip, quantized_products, check_finite, compute
    fake = lambda leaf, choice: _fake(leaf, choice, None, None, *settings)
    return replace_chosen(fake, model, choices, caller=caller)


class FakeQuantized(QuantizesLater):
    """A model with quantization-aware training.

    You call it like the model. Its arrays are the floating-point arrays of the model,
    which `eqx.filter_grad` differentiates and an optimiser updates. After training,
    `.quantized()` returns the quantized model.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        model = eqquant.FakeQuantized(model, "int8", rules={"layers.0.*": "nf4"})


        @eqx.filter_jit
        @eqx.filter_grad
        def gradient(model, x):
            return jnp.sum(jax.vmap(model)(x) ** 2)


        gradients = gradient(model, jnp.ones((8, 64)))
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients))
        quantized = model.quantized()
        assert type(quantized) is eqx.nn.MLP
        assert quantized.layers[0].weight.format == eqquant.NF4()
        ```

    **Arguments:**

    - `model`: any pytree. To call the wrapper, it must be callable.
    - `format`, `where`, `rules`, `min_size`, `check_finite`: as in
        [`eqquant.quantize_tree`][]. The weights are chosen once, in the constructor.
    - `clip`: as in [`eqquant.straight_through`][].
    - `learn_scales`: also train the scales, by LSQ (arXiv 1902.08153). They start from
        [`eqquant.training.initial_scales`][], and are in the field `scales`, in the
        order of `choices`. Affine formats also learn their `offsets`, by LSQ+ (arXiv
        2004.09576); both start from the choices of [`eqquant.quantize`][].
    - `quantized_products`: as in [`eqquant.training.fake_quantize_tree`][]. Results
        then equal the results of `.quantized()`, bit for bit.
    - `rotate`: round in a rotated basis, like [`eqquant.quantize_tree`][]. The trained
        weights stay in the original basis. Not compatible with `quantized_products`.
    - `precision`, `activations`, `compute`: as in [`eqquant.quantize_tree`][], for the
        products of `.quantized()`. With `activations="int8"`, training rounds
        activations as well.

    [`eqquant.shard_tree`][] shards it over a mesh. Its quantized weights, and the
    result of `.quantized()`, then have the same sharding.
    """

    model: Any
    scales: tuple[Float[Array, "..."], ...] | None
    offsets: tuple[Float[Array, "..."] | None, ...] | None
    choices: tuple[Choice, ...] = eqx.field(static=True)
    clip: bool = eqx.field(static=True)
    quantized_products: bool = eqx.field(static=True)
    rotate: bool | int = eqx.field(static=True)
    check_finite: bool = eqx.field(static=True)
    compute: Compute = eqx.field(static=True)
    splits: tuple[Split, ...] | None = eqx.field(static=True, metadata={"saved": False})

    @typed
    def __init__(
        self,
        model: Any,
        format: Format | str | None = "nf4",
        *,
        where: Any = None,
        rules: Mapping | None = None,
        min_size: int = 256,
        clip: bool = False,
        learn_scales: bool = False,
        quantized_products: bool = False,
        rotate: bool | int = False,
        check_finite: bool = True,
        precision: str | None = None,
        activations: str | None = None,
        compute: Compute | None = None,
    ):
        choices = choose(
            model, format, where=where, rules=rules, min_size=min_size, caller=_name
        )
        _check_some(choices, _name)
        check_rotation(_name, rotate)
        compute = as_compute(compute, precision, activations)
        rounds = any((c.compute or compute).activations != "float" for c in choices)
        if rotate and (quantized_products or rounds):
            raise ValueError(
                f"{_name}: rotate must be False with quantized_products, and with "
                "activations='int8': results would not be those of the quantized model."
            )
        self.compute = compute
        self.model = model
        self.choices = tuple(choices)
        self.clip = clip
        self.quantized_products = quantized_products
        self.rotate = rotate
        self.check_finite = check_finite
        self.splits = None
        self.scales = self.offsets = None
        if learn_scales:
            starts = []

            def add(leaf, choice):
                leaf, _ = self._in_basis(leaf, choice)
                starts.append(initial_parts(leaf, choice.format, choice.axis))

            replace_chosen(add, model, choices, caller=_name)
            self.scales, self.offsets = zip(*starts, strict=True)

    def __call__(self, *args, **kwargs):
        return self.fake_quantized()(*args, **kwargs)

    def fake_quantized(self) -> Any:
        """Return the model with straight-through weights, like
        [`eqquant.training.fake_quantize_tree`][], for example to call a method other
        than `__call__`."""

        settings = self.clip, self.quantized_products, self.check_finite, self.compute

        def fake(leaf, choice, scales, offsets):
            is_learned = scales is not None
            if not isinstance(leaf, QuantizedArray | RotatedArray):
                weight, to_original = self._in_basis(leaf, choice)
                out = to_original(_fake(weight, choice, scales, offsets, *settings))
                if weight is leaf or self.clip or is_learned:
                    return out
                # Rotating there and back is also the identity for gradients.
                return straight_through_value(lax.stop_gradient(out), leaf)
            if leaf.format != choice.format or is_learned:
                learned = " with learned scales" if is_learned else ""
                raise ValueError(
                    f"it was trained for {choice.format!r}{learned}, but was quantized "
                    f"to {leaf.format!r}, so its values differ. Convert the trained "
                    "model with `.quantized()`."
                )
            return leaf

        return self._replace(fake)

    def quantized(self) -> Any:
        """Return the quantized model, like [`eqquant.quantize_tree`][], with the
        learned scales."""

        def quantize_weight(leaf, choice, scales, offsets):
            if isinstance(leaf, QuantizedArray | RotatedArray):
                raise ValueError("it is quantized already.")
            return self._quantized(leaf, choice, self.check_finite, scales, offsets)

        return self._replace(quantize_weight)

    def _quantized(
        self, leaf, choice: Choice, check_finite: bool, scales=None, offsets=None
    ):
        weight, to_original = self._in_basis(leaf, choice)
        q = quantize(
            weight,
            choice.format,
            axis=choice.axis,
            scales=scales,
            offsets=offsets,
            check_finite=check_finite,
            compute=choice.compute or self.compute,
        )
        return to_original(q)

    def _in_basis(self, leaf, choice: Choice) -> tuple[Any, Callable]:
        """Return the weight in its rounding basis, and a function that rotates plain or
        quantized arrays back."""
        same = lambda x: x
        if not self.rotate or not leaf.ndim:
            return leaf, same
        axis = canonical_axes(choice.axis, leaf.ndim)[-1]
        weight, block = rotated(leaf, axis, self.rotate)
        if block == 1:
            return leaf, same

        def to_original(x):
            if isinstance(x, QuantizedArray):
                return RotatedArray(x.replace(dtype=leaf.dtype), block)
            return hadamard(x, axis, block).astype(leaf.dtype)

        return weight, to_original

    def with_splits(self, splits: Any) -> "FakeQuantized":
        """Store the shardings of [`eqquant.shard_tree`][], which also places the
        arrays."""
        arrays = jax.tree.leaves(self.model, is_leaf=is_implicit)
        all_splits = jax.tree.leaves(splits.model)
        chosen = tuple(all_splits[choice.index] for choice in self.choices)
        for choice, split in zip(self.choices, chosen, strict=True):
            make = ft.partial(self._quantized, choice=choice, check_finite=False)
            q = arrays[choice.index]
            q = q if is_implicit(q) else jax.eval_shape(make, q)
            path = f"model.{choice.path}"
            check_spec(path, q, split.spec, split.mesh, "shard_tree")
        out = object.__new__(type(self))
        for field in dataclasses.fields(self):
            value = chosen if field.name == "splits" else getattr(self, field.name)
            object.__setattr__(out, field.name, value)
        return out

    def _replace(self, fn: Callable) -> Any:
        paths = {i: site.path for i, site in enumerate(sites(self.model))}
        if any(paths.get(choice.index) != choice.path for choice in self.choices):
            raise ValueError(
                f"{_name}: the model has another structure than when it was wrapped. "
                "Wrap it anew."
            )
        none = (None,) * len(self.choices)
        parts = self.scales or none, self.offsets or none, self.splits or none
        parts_of = dict(zip(self.choices, zip(*parts, strict=True), strict=True))

        def replace(leaf, choice):
            scales, offsets, split = parts_of[choice]
            new = fn(leaf, choice, scales, offsets)
            return split(new) if split is not None and is_implicit(new) else new

        return replace_chosen(replace, self.model, self.choices, caller=_name)


_name = FakeQuantized.__name__


def _check_some(choices, caller: str) -> None:
    if not choices:
        raise ValueError(
            f"{caller}: no weight is chosen, so this would train in floating point. "
            "`eqquant.report(model)` lists the reason for each array; see where, rules "
            "and min_size."
        )


def _fake(
    leaf,
    choice: Choice,
    scales,
    offsets,
    clip: bool,
    quantized_products: bool,
    check_finite: bool,
    compute: Compute,
):
    compute = choice.compute or compute
    options = {
        "axis": choice.axis,
        "scales": scales,
        "offsets": offsets,
        "clip": clip,
        "check_finite": check_finite,
    }
    if quantized_products or compute.activations != "float":
        return make_trainable(leaf, choice.format, compute=compute, **options)
    return straight_through(leaf, choice.format, **options)
