"""Checks and explanations of functions with quantized arrays."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax

from .._jax import typed
from ..arrays import ImplicitArray, MaterialiseError, QuantizedArray
from ..dispatch import substitute
from ..formats import num_codes, planes_of
from ._flow import Flow, TrackedWeight
from ._in_hlo import decoded_in_hlo
from ._in_jaxpr import decoded_in_jaxpr


@typed
def assert_not_materialised(fn: Callable, *args: Any, **kwargs: Any) -> None:
    """Check that a function never holds a whole quantized array in floating point.

    The function is traced and compiled for this platform, but not run. The check
    follows the codes of each quantized array through the jaxpr, the lowering of each
    product, and the compiled program. It fails if a floating-point array depends on as
    many elements as the quantized array, or one matrix of a stack, contains.

    Activations may have the size of a weight. A value counts as an activation after a
    product, a sum over an axis, or a lookup of rows by indices from the arguments or
    closure of `fn`. (Indices that `fn` makes itself, such as `jnp.arange`, do not
    count.) The inside of a kernel is not inspected; a kernel with codes and an
    activation counts as a product.

    !!! Example

        ```python
        import eqquant
        import jax
        import jax.numpy as jnp

        w = eqquant.quantize(jax.random.normal(jax.random.key(0), (256, 256)), "nf4")
        x = jnp.ones((256, 256))
        eqquant.debug.assert_not_materialised(lambda x, w: jnp.tanh(x @ w.T), x, w)
        ```

    **Arguments:**

    - `fn`: a function.
    - `*args`, `**kwargs`: its arguments. The check tracks the quantized arrays in them
        and in the closure of `fn`.

    **Raises:**

    [`eqquant.MaterialiseError`][], with the primitives and shapes of decoded weights.
    """
    found = materialised(fn, *args, **kwargs)
    if found:
        raise MaterialiseError(
            "whole quantized arrays appear in floating point:\n  " + "\n  ".join(found)
        )


@typed
def assert_trainable(tree: Any) -> None:
    """Check that a pytree contains no codes and no scales of a quantized array.

    Call it before you differentiate the pytree, or pass it to an optimiser. Codes are
    integers without a gradient. Scales have a gradient, but you rarely want to train
    them, or to decay them with AdamW. JAX and optax do not distinguish them from other
    arrays.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqquant.quantize_tree(eqx.nn.Linear(64, 64, key=jax.random.key(0)))
        trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
        eqquant.debug.assert_trainable(trainable)
        ```

    **Arguments:**

    - `tree`: any pytree.

    **Raises:**

    `TypeError`, with the path of all codes and scales.
    """
    found = []
    is_leaf = lambda x: isinstance(x, QuantizedArray)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        if is_leaf(leaf):
            parts = jax.tree_util.tree_leaves_with_path(leaf)
            found += [jax.tree_util.keystr((*path, *below)) for below, _ in parts]
    if found:
        raise TypeError(
            f"parts of quantized arrays cannot be trained: {', '.join(found)}. Take "
            "them out with `eqx.partition(model, eqquant.trainable_mask(model))`; to "
            "train beside quantized weights see `eqquant.lora_tree`, and to train the "
            "weights themselves `eqquant.FakeQuantized`."
        )


def materialised(fn: Callable, *args: Any, **kwargs: Any) -> list[str]:
    """Return the locations that [`eqquant.debug.assert_not_materialised`][] reports."""
    weights: list[Any] = []
    flow_of_part: dict[int, Flow] = {}

    def watch(q: ImplicitArray):
        weights.append(q)
        flow_of_part.update(_flows_of_parts(q))
        # A different object, so that its containers count as changed.
        return jax.tree.leaves(q)[0]

    substitute((fn, args, kwargs), watch)

    def flow_of(part) -> Flow:
        return flow_of_part.get(id(part), Flow(data=True))

    # Arrays in the closure of `fn` become arguments, because XLA would fold constants.
    def call(weights, rest):
        replaced = iter(weights)
        new_fn, args, kwargs = substitute(
            (fn, *eqx.combine(rest, static)), lambda _: next(replaced)
        )
        return _arrays(new_fn(*args, **kwargs))

    rest, static = eqx.partition((args, kwargs), eqx.is_array)
    dynamic = weights, rest
    flows = [flow_of(part) for part in jax.tree.leaves(dynamic)]
    jaxpr = jax.make_jaxpr(call)(*dynamic)
    found = decoded_in_jaxpr(jaxpr, flows, flow_of, jax.default_backend())
    compiled = jax.jit(call, keep_unused=True).lower(*dynamic).compile()
    return found + decoded_in_hlo(compiled.as_text() or "", flows)


def _flows_of_parts(q: ImplicitArray) -> dict[int, Flow]:
    """Return the flow of each part by its `id`. Only codes are followed."""
    flows: dict[int, Flow] = {}
    for part in jax.tree.leaves(q, is_leaf=has_codes):
        if has_codes(part):
            flows |= {id(leaf): Flow() for leaf in jax.tree.leaves(part)}
            weight = weight_of(part)
            flows[id(part.codes)] = Flow({weight: weight.decoded})
    return flows


def has_codes(x: Any) -> bool:
    return isinstance(x, QuantizedArray) and x.is_whole


def weight_of(q: QuantizedArray) -> TrackedWeight:
    decoded = num_codes(math.prod(q.codes.shape), q.format.bits)
    per_code = planes_of(q.format.bits)
    matrices = {q.size, decoded}
    if q.ndim > 2:
        matrices.add(math.prod(q.shape[1:]))
    stacked = math.prod(q.codes.shape[:-2])
    if stacked:
        matrices |= {q.size // stacked, decoded // stacked}
    return TrackedWeight(q.size, decoded, per_code, frozenset(matrices))


def _arrays(out: Any) -> list:
    return jax.tree.leaves(eqx.filter(out, eqx.is_array))


def on_arrays(fn: Callable, args: tuple, kwargs: dict) -> tuple[Callable, Any]:
    """Return `fn` as a function from the arrays in its arguments to result arrays."""
    is_array = lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
    dynamic, static = eqx.partition((args, kwargs), is_array)

    def call(dynamic):
        args, kwargs = eqx.combine(dynamic, static)
        return _arrays(fn(*args, **kwargs))

    return call, dynamic


def path_of(keys: Sequence[Any]) -> str:
    """Return the path of an array from its keys in `(args, kwargs)`."""
    names = [
        str(next(getattr(k, a) for a in ("name", "key", "idx") if hasattr(k, a)))
        for k in keys
    ]
    return ".".join(names[2:]) or f"argument {names[1]}"
