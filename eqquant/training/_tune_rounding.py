"""AutoRound (arXiv 2309.05516): roundings that are trained by their effect."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._jax import typed
from ..arrays import encode, hadamard, is_quantized, QuantizedArray, RotatedArray
from ..formats import float_scales, Format
from ..trees import check_forward, each_batch
from ._distill import relative_error


_caller = "tune_rounding"


@typed
def tune_rounding(
    student: Any,
    teacher: Any,
    fn: Callable,
    batches: Iterable,
    *,
    steps: int = 200,
    rate: float | None = None,
    progress: bool | None = None,
) -> Any:
    """Choose the codes of quantized weights so that outputs are close to given ones.

    Each weight becomes one of the two levels beside it, times its scale. A step of
    AutoRound (Cheng et al., arXiv 2309.05516) moves the boundary between both by the
    sign of the gradient. Scales and all other arrays stay.

    Use it for a part of a model, such as one layer after the other, with the inputs
    from the parts that are quantized before, and the outputs of the float part. Few
    batches suffice. The function computes gradients of dense weights, so it needs as
    much memory as training this part.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        layer = eqx.nn.MLP(64, 64, 128, 1, key=jax.random.key(0))
        quantized = eqquant.quantize_tree(layer, "int3")


        def forward(layer, x):
            return jax.vmap(layer)(x)


        keys = jax.random.split(jax.random.key(1), 4)
        inputs = [jax.random.normal(key, (32, 64)) for key in keys]
        batches = [(x, forward(layer, x)) for x in inputs]
        better = eqquant.training.tune_rounding(
            quantized, layer, forward, batches, steps=50
        )
        old, new = quantized.layers[0].weight, better.layers[0].weight
        assert (old.scales == new.scales).all() and (old.codes != new.codes).any()
        ```

    **Arguments:**

    - `student`: a model, or a part of it, with quantized weights. Their formats may
        have a table or integers, but no offsets and no trellis codes. Weights of
        convolutions are not supported. Codes are not used, and any rotation is kept.
    - `teacher`: the same model with float weights.
    - `fn`: `fn(student, inputs)` returns the outputs, a pytree. It receives dense
        weights, so it does not need [`eqquant.quaxify`][].
    - `batches`: pairs `(inputs, expected)`, with equal shapes for one compilation. The
        loss is the mean over output arrays of the relative squared error.
    - `steps`: the number of steps. They take the batches in turn.
    - `rate`: the size of the first step, as a share of the distance of two levels. It
        decreases linearly. The default is `0.5 / steps`. If nothing improves, try a
        tenth: random inputs without preferred directions need smaller steps.
    - `progress`: whether to show a progress bar. By default, long work shows one.

    **Returns:**

    The student with new codes. If rounding to nearest, or `student` itself, has a
    smaller error over all batches, that is returned.

    **Raises:**

    - `ValueError`: `student` has no quantized weight, one has an unsupported format or
        no float weight in `teacher`, there is no batch, outputs are not finite, or
        `steps` or `rate` is not positive.
    - `TypeError`: `fn` and `student` are swapped, or `batches` is one batch.
    """
    order = "student, teacher, fn, batches"
    check_forward(fn, student, batches, _caller, order)
    batches = list(batches)
    rate = 0.5 / max(steps, 1) if rate is None else rate
    if steps < 1 or not (math.isfinite(rate) and rate > 0):
        raise ValueError(
            f"{_caller}: steps={steps!r} and rate={rate!r} must be positive numbers."
        )
    if not batches:
        raise ValueError(f"{_caller}: batches is empty. Pass at least one pair.")
    leaves, structure = jax.tree.flatten(student, is_leaf=is_quantized)
    choices = list(_choices(student, teacher))
    known = [choice for choice in choices if choice is not None]
    offsets = [choice.start for choice in known]
    whole = (batches[i % len(batches)] for i in range(steps))
    size = 3 * sum(choice.low.size for choice in known)
    shown = each_batch(whole, size, progress, caller=_caller, title="Rounding")
    for i, (inputs, expected) in shown:
        now = jnp.float32(rate * (1 - i / steps))
        offsets = _step(fn, student, choices, offsets, inputs, expected, now)

    def model(offsets):
        new = (choice.encoded(x) for choice, x in zip(known, offsets, strict=True))
        return jax.tree.unflatten(structure, _merged(leaves, choices, new))

    def error(model):
        total = sum(float(_error(fn, model, *batch)) for batch in batches)
        if not math.isfinite(total):
            raise ValueError(
                f"{_caller}: outputs differ from the expected ones by {total}. Pass "
                "batches without NaN and infinity."
            )
        return total

    nearest = [choice.start for choice in known]
    return min((student, model(nearest), model(offsets)), key=error)


def _merged(leaves: list, choices: list, new: Iterable) -> list:
    """Return the leaves, with the next of `new` for each choice."""
    rest = iter(new)
    pairs = zip(leaves, choices, strict=True)
    return [leaf if choice is None else next(rest) for leaf, choice in pairs]


class _Choice(eqx.Module):
    """The two values beside each weight, in the basis in which it is stored.

    `start` plus a half is the position of the weight between both. A weight becomes
    `high` if its offset is not negative.
    """

    low: Float[Array, "..."]
    high: Float[Array, "..."]
    start: Float[Array, "..."]
    plain: QuantizedArray | RotatedArray

    def value(self, offset: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.where(offset >= 0, self.high, self.low)

    def dense(self, value: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the weight in its original basis."""
        if isinstance(self.plain, RotatedArray):
            value = hadamard(value, self.plain.axis, self.plain.block)
        return value.astype(self.plain.dtype)

    def moved(self, offset, gradient, rate):
        new = offset - rate * jnp.sign(gradient)
        return jnp.clip(new, self.start - 0.5, self.start + 0.5)

    def encoded(self, offset: Float[Array, "..."]) -> QuantizedArray | RotatedArray:
        base = _base(self.plain)
        scales = float_scales(base.scales).astype(base.format.scale_dtype)
        # Each value is a level times its scale, so encoding is exact.
        codes = encode(self.value(offset), base.format, base.axes, scales)[0].codes
        new = base.replace(codes=codes)
        is_rotated = isinstance(self.plain, RotatedArray)
        return self.plain.replace(base=new) if is_rotated else new


def _choices(student: Any, teacher: Any) -> Iterator[_Choice | None]:
    """Yield the choice of each leaf of the student, or None for other leaves."""
    paths = jax.tree_util.tree_flatten_with_path(student, is_leaf=is_quantized)[0]
    floats = dict(jax.tree_util.tree_flatten_with_path(teacher)[0])
    if not any(is_quantized(leaf) for _, leaf in paths):
        raise ValueError(
            f"{_caller}: student has no quantized weight. Quantize it first, with "
            "`eqquant.quantize_tree`."
        )
    for path, leaf in paths:
        if not is_quantized(leaf):
            yield None
            continue
        name = jax.tree_util.keystr(path).removeprefix(".")
        weight = floats.get(path)
        if getattr(weight, "shape", None) != leaf.shape:
            raise ValueError(
                f"{_caller}: teacher has no float weight of shape {leaf.shape} at "
                f"{name}. Pass the model before `quantize_tree`."
            )
        yield _choice(weight, leaf, name)


def _choice(weight: Any, plain: Any, name: str) -> _Choice:
    base = _base(plain)
    format, weight = base.format, jnp.asarray(weight, jnp.float32)
    no_nearest = type(format).nearest is Format.nearest
    if format.history or format.has_offsets or no_nearest or len(base.axes) != 1:
        raise ValueError(
            f"{_caller}: {name} is in {format!r}, with blocks along axes {base.axes}. "
            "Formats with offsets, trellis codes, and blocks of several axes, such as "
            "those of convolutions, are not supported. Quantize a linear layer in "
            "another format, such as 'nf4', or round by GPTQ: `eqquant.calibrate`."
        )
    axis = base.axes[-1]
    if isinstance(plain, RotatedArray):
        weight = hadamard(weight, axis, plain.block)
    scales = jnp.moveaxis(float_scales(base.scales, jnp.float32), axis, -1)
    weight = jnp.moveaxis(weight, axis, -1)
    size = weight.shape[-1]
    unit = jnp.repeat(scales, format.block_size or size, -1)[..., :size]
    levels = _levels(format)
    share = jnp.where(unit == 0, 0, weight / jnp.where(unit == 0, 1, unit))
    above = jnp.clip(jnp.searchsorted(levels, share), 1, len(levels) - 1)
    below, above = levels[above - 1] * unit, levels[above] * unit
    low, high = jnp.minimum(below, above), jnp.maximum(below, above)
    distance = jnp.where(high > low, high - low, 1)
    start = jnp.clip((weight - low) / distance, 0, 1) - 0.5
    low, high, start = (jnp.moveaxis(part, -1, axis) for part in (low, high, start))
    return _Choice(low, high, start, plain)


def _base(plain: QuantizedArray | RotatedArray) -> QuantizedArray:
    base = plain.base if isinstance(plain, RotatedArray) else plain
    assert isinstance(base, QuantizedArray)  # Weights are no caches.
    return base


def _levels(format: Format) -> Float[Array, " levels"]:
    return jnp.unique(format.levels(jnp.asarray(format.used_codes), jnp.float32))


def _dense(student: Any, choices: list, values: list) -> Any:
    """Return the student with dense weights."""
    leaves, structure = jax.tree.flatten(student, is_leaf=is_quantized)
    known = [choice for choice in choices if choice is not None]
    dense = (choice.dense(value) for choice, value in zip(known, values, strict=True))
    return jax.tree.unflatten(structure, _merged(leaves, choices, dense))


@eqx.filter_jit
def _step(fn, student, choices: list, offsets: list, inputs, expected, rate):
    known = [choice for choice in choices if choice is not None]

    def loss(values):
        return relative_error(fn(_dense(student, choices, values), inputs), expected)

    values = [c.value(offset) for c, offset in zip(known, offsets, strict=True)]
    gradients = jax.grad(loss)(values)
    rows = zip(known, offsets, gradients, strict=True)
    return [choice.moved(offset, gradient, rate) for choice, offset, gradient in rows]


@eqx.filter_jit
def _error(fn, student, inputs, expected) -> Float[Array, ""]:
    dense = jax.tree.map(
        lambda x: x.dequantize() if is_quantized(x) else x,
        student,
        is_leaf=is_quantized,
    )
    return relative_error(fn(dense, inputs), expected)
