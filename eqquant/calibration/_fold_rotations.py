"""Rotations that are folded into neighbouring weights."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._jax import typed, wide_dtype
from ..arrays import check_rotation, hadamard, is_implicit
from ..trees import as_text, check_forward, sites
from .bases import Source, sources_of


_caller = "fold_rotations"


@dataclasses.dataclass(frozen=True)
class FoldedRow:
    """How the inputs of one weight are rotated.

    **Fields:**

    - `path`, `shape`: the path and the shape of the weight.
    - `block`: the number of consecutive values that are rotated together; None if the
        rotation is not folded.
    - `reason`: why it is not folded, or an empty string.
    """

    path: str
    shape: tuple[int, ...]
    block: int | None
    reason: str


@dataclasses.dataclass(frozen=True, repr=False)
class FoldedRotations:
    """The result of [`eqquant.calibration.fold_rotations`][]. Print it to get a table.

    !!! Example

        ```python
        import eqquant
        import jax

        model = {"in": jax.random.normal(jax.random.key(0), (64, 32))}
        model["out"] = model["in"].T
        forward = lambda model, x: (x @ model["in"].T) @ model["out"].T
        folded = eqquant.calibration.fold_rotations(forward, model, model["in"])
        into, out = folded.rows
        assert into.block is None and into.reason == "an input of the function"
        assert out.path == "out" and out.block == 64
        ```

    **Fields:**

    - `model`: the model with rotated weights, in floating point.
    - `rotate`: for `rotate` of [`eqquant.quantize_tree`][] and [`eqquant.allocate`][].
    - `rows`: a `FoldedRow` for each weight that a product reads.
    - `difference`: the root mean square of the change of the results for the batch,
        relative to the root mean square of the results.
    """

    model: Any
    rotate: Mapping[str, bool | int]
    rows: tuple[FoldedRow, ...]
    difference: float

    def __str__(self) -> str:
        table = [("path", "shape", "block", "kept by")]
        for row in self.rows:
            shape = "x".join(map(str, row.shape))
            table.append((row.path, shape, str(row.block or "-"), row.reason))
        folded = sum(row.block is not None for row in self.rows)
        total = f"{folded} of {len(self.rows)} rotations are folded."
        change = f"The results change by {self.difference:.1e} of their size."
        return "\n".join([*as_text(table), f"{total} {change}"])

    __repr__ = __str__


@typed
def fold_rotations(
    fn: Callable, model: Any, batch: Any, *, rotate: bool | int = True
) -> FoldedRotations:
    """Rotate the weights of a model so that its results stay the same.

    `rotate=True` of [`eqquant.quantize_tree`][] rotates the inputs of each weight when
    the model runs. The rotation can be part of the weights that compute these inputs
    (QuaRot, arXiv 2404.00456): a weight `W` reads `x H` as `W H`, and the weight `V`
    that computes `x = V y` becomes `H V`.

    This function traces `fn` and finds all arrays that must be rotated together:

    - Sums, norms without a mean (RMSNorm), products with other weights, reshapes and
      slices between blocks do not depend on the rotation. The gain of a norm moves to
      the weights behind it, and becomes 1.
    - Functions of each element, means and position embeddings do. So does a gain in
      front of an embedding that is also the head, because lookups read the embedding
      without the gain.

    In a Llama, all rotations are folded except the one in front of `down`, behind the
    activation function. If the head is the embedding, only the rotation in front of the
    output projection of attention is folded.

    !!! Example

        ```python
        import eqquant
        import jax
        import jax.numpy as jnp

        def norm(x, gain):
            return gain * x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

        def forward(model, tokens):
            x = model["embedding"][tokens]
            y = jax.nn.silu(norm(x, model["gain"]) @ model["up"].T)
            x = x + y @ model["down"].T
            return norm(x, model["last"]) @ model["head"].T

        keys = iter(jax.random.split(jax.random.key(0), 4))
        normal = lambda *shape: jax.random.normal(next(keys), shape) / 8
        model = {"embedding": normal(100, 64), "head": normal(100, 64)}
        model |= {"up": normal(256, 64), "down": normal(64, 256)}
        model |= {"gain": 1 + jnp.arange(64) / 64, "last": jnp.ones(64)}
        folded = eqquant.calibration.fold_rotations(forward, model, jnp.arange(20))
        assert folded.rotate == {"up": False, "head": False, "*": True}
        assert folded.difference < 1e-5
        print(folded)
        quantized = eqquant.quantize_tree(
            folded.model, "nf4", where=lambda x: x.ndim == 2, rotate=folded.rotate
        )
        ```

    **Arguments:**

    - `fn`: `fn(model, batch)`, the forward pass. The model must be used with this
        function: arrays that it does not return, such as a cache of keys and values,
        may be rotated.
    - `model`: any pytree that is not quantized yet.
    - `batch`: one batch for `fn`.
    - `rotate`: as in [`eqquant.quantize_tree`][], for all weights. A folded block is
        the largest power of two that divides all axes in it.

    **Returns:**

    [`eqquant.calibration.FoldedRotations`][]. Calibrate and quantize its `model`, and
    pass its `rotate` to [`eqquant.quantize_tree`][].

    **Raises:**

    - `ValueError` if `rotate` is neither a bool nor a power of two, or if `fn` returns
        no floating-point array.
    - `RuntimeError` if the results change by more than rounding can explain. Please
        report it.
    """
    check_rotation(_caller, rotate)
    if rotate is False:
        raise ValueError(
            f"{_caller}: rotate must be True or the number of values that are rotated "
            "together, got False."
        )
    check_forward(fn, model, [batch], _caller, "fn, model, batch")
    leaves, treedef = jax.tree.flatten(model, is_leaf=is_implicit)
    chosen = [i for i, leaf in enumerate(leaves) if eqx.is_inexact_array(leaf)]
    arrays, static = eqx.partition(batch, eqx.is_array)

    def rebuilt(floats):
        new = dict(zip(chosen, floats, strict=True))
        return treedef.unflatten([new.get(i, leaf) for i, leaf in enumerate(leaves)])

    def results(floats, arrays):
        out = fn(rebuilt(floats), eqx.combine(arrays, static))
        return eqx.filter(jax.tree.leaves(out), eqx.is_inexact_array)

    names = [site.path for site in sites(model)]
    paths = [names[i] for i in chosen]
    floats = [leaves[i] for i in chosen]
    jaxpr = jax.make_jaxpr(results)(floats, arrays)
    if not jaxpr.out_avals:
        raise ValueError(f"{_caller}: fn must return a floating-point array, got none.")
    others = len(jaxpr.in_avals) - len(floats)
    sources = sources_of(jaxpr, [*paths, *[None] * others])
    known = dict(zip(paths, floats, strict=True))
    new = _rotated(known, sources, rotate)
    difference = _difference(results, floats, new, arrays)
    named = zip(paths, floats, sources, strict=True)
    rows = tuple(row for one in named for row in _rows(*one, rotate))
    unrotated = {row.path: False for row in rows if row.block is not None}
    return FoldedRotations(rebuilt(new), unrotated | {"*": rotate}, rows, difference)


def _rotated(
    leaves: dict[str, Array], sources: list[list[Source]], rotate: bool | int
) -> list[Array]:
    """Return the leaves in their new bases. Gains move to the weights."""
    every = [source for of_leaf in sources for source in of_leaf]
    read = {s.basis.root for s in every if _is_read(s)}
    folded = {s for s in every if s.basis.root in read}
    gains = {s: use for s in folded for use in s.uses if use and use.source is not s}
    # A gain that has moved is 1.
    moved = {gain.source.path: 1 - gain.shift for gain in gains.values()}
    new = []
    for (path, leaf), of_leaf in zip(leaves.items(), sources, strict=True):
        if path in moved:
            new.append(jnp.full_like(leaf, moved[path]))
            continue
        mine = [source for source in of_leaf if source in folded]
        if not mine:
            new.append(leaf)
            continue
        x = leaf.astype(wide_dtype(leaf.dtype))
        for source in mine:
            if gain := gains.get(source):
                factor = leaves[gain.source.path].astype(x.dtype) + gain.shift
                x = x * _along(factor, x.ndim, source.axis)
            x = hadamard(x, source.axis, _block(source, rotate))
        new.append(x.astype(leaf.dtype))
    return new


def _is_read(source: Source) -> bool:
    """Return whether a product reads a weight along an axis that can be rotated."""
    return source.is_contracted and source.ndim > 1 and not source.basis.reason


def _along(gain: Array, ndim: int, axis: int) -> Array:
    """Return a gain, or a stack of gains, as a factor of a weight, or of a stack."""
    *stack, size = gain.shape
    shape = [*stack, *(1 for _ in range(ndim - len(stack)))]
    shape[axis] = size
    return gain.reshape(shape)


def _block(source: Source, rotate: bool | int) -> int:
    block = source.basis.block
    return block if rotate is True else min(block, rotate)


def _rows(
    path: str, leaf: Array, sources: list[Source], rotate: bool | int
) -> Iterator[FoldedRow]:
    read = [s for s in sources if s.is_contracted and s.ndim > 1]
    if folded := [s for s in read if _is_read(s)]:
        yield FoldedRow(path, leaf.shape, _block(folded[0], rotate), "")
    elif read:
        yield FoldedRow(path, leaf.shape, None, read[0].basis.reason)


def _difference(results: Callable, old: list, new: list, arrays: Any) -> float:
    """Return the relative change of the results.

    Raises a `RuntimeError` if rounding cannot explain it."""
    with jax.default_matmul_precision("highest"):
        run = jax.jit(results)
        pairs = zip(run(old, arrays), run(new, arrays), strict=True)
        sums = [_squares(a, b) for a, b in pairs]
    change, size = np.sum(np.asarray(sums, np.float64), 0)
    difference = float(np.sqrt(change / size)) if size else float(change)
    # Rounding errors of a deep network are larger than those of one product.
    eps = (float(jnp.finfo(leaf.dtype).eps) for leaf in old)
    limit = max(eps, default=0.0) ** 0.5
    if not difference <= limit:
        raise RuntimeError(
            f"{_caller}: the results change by {difference:.1e} of their size, and "
            f"rounding explains at most {limit:.1e}. Please report this model: the "
            "change is an error of eqquant."
        )
    return difference


def _squares(a: Array, b: Array) -> Array:
    """Return the sum of the squared changes, and of the squares. Infinite values, such
    as those of a mask, must be the same."""
    a, b = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (a, b))
    change = jnp.where(a == b, 0, jnp.abs(a - b))
    size = jnp.where(jnp.isfinite(a), jnp.abs(a), 0)
    return jnp.stack([jnp.sum(jnp.square(change)), jnp.sum(jnp.square(size))])
