"""Checks and explanations of what a function does with quantized arrays."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .._jax import is_manual, num_devices_of, open_jaxpr, subjaxprs, typed
from ..arrays import ImplicitArray, MaterialiseError, QuantizedArray
from ..dispatch import substitute
from ..formats import num_codes, planes_of
from ..kernels import Compute
from ..primitives import lowering_of, quantized_dot_p
from ._flow import Flow, Weight
from ._in_hlo import decoded_in_hlo
from ._in_jaxpr import decoded_in_jaxpr


@typed
def assert_not_materialised(fn: Callable, *args: Any, **kwargs: Any) -> None:
    """Check that calling a function never holds a whole quantized array in floating
    point.

    The function is traced and compiled for this platform, not run. The codes of each
    quantized array in `fn` or its arguments are followed from there on: through the
    jaxpr, what each product is lowered to, and the compiled program. No floating-point
    array may be made of them that has as many elements as the quantized array, or as
    one matrix of a stack.

    An activation may be as large as a weight. A value is an activation, and followed no
    further, once it comes out of a product or of a sum over an axis, or out of a lookup
    of rows by indices that `fn` gets or holds. (Indices that `fn` makes itself, such as
    `jnp.arange`, do not count.) What happens within a kernel is not looked at; one that
    gets an activation beside the codes is taken for a product.

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
    - `*args`, `**kwargs`: its arguments; quantized arrays in them, or in what `fn`
        closes over, are watched.

    **Raises:**

    [`eqquant.MaterialiseError`][], with the primitives and shapes that are too large.
    """
    found = materialised(fn, *args, **kwargs)
    if found:
        raise MaterialiseError(
            "whole quantized arrays appear in floating point:\n  " + "\n  ".join(found)
        )


@typed
def assert_trainable(tree: Any) -> None:
    """Check that a pytree holds no part of a quantized array. Call it before you
    differentiate the pytree, or give it to an optimiser.

    Codes are integers and have no gradient. Scales have one, but you rarely want to
    train them, or to decay them as AdamW does. JAX and optax do not see the difference.

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

    `TypeError`, with the path of each codes or scales.
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
    """The places where [`eqquant.debug.assert_not_materialised`][] sees a weight."""
    weights: list[Any] = []
    flow_of_part: dict[int, Flow] = {}

    def watch(q: ImplicitArray):
        weights.append(q)
        flow_of_part.update(_flows_of_parts(q))
        # Anything else, so that what holds it counts as changed.
        return jax.tree.leaves(q)[0]

    substitute((fn, args, kwargs), watch)

    def flow_of(part) -> Flow:
        return flow_of_part.get(id(part), Flow(data=True))

    # Arrays that `fn` holds become arguments: XLA would fold constants.
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


def decoded_on_devices(text: str, args: Any) -> list[str]:
    """The places in a program for many devices where one of them holds a weight in
    floating point: all of its own part, or of that and what it gathered.

    **Arguments:**

    - `text`: of a compiled program that keeps arguments which it does not use.
    - `args`: what it was compiled for: arrays with shardings, abstract or not.
    """
    flows = {}

    def follow(q):
        if _has_codes(q):
            weight = _weight_of(q)
            part = q.codes.sharding.shard_shape(q.codes.shape)
            own = num_codes(math.prod(part), q.format.bits)
            # What is not split is gathered, and may be so axis by axis.
            matrix = own // math.prod(part[:-2])
            sizes = {own, matrix}
            for axis in (-1, -2):
                sizes.add(matrix * q.codes.shape[axis] // part[axis])
            weight = dataclasses.replace(weight, matrices=weight.matrices | sizes)
            flows[id(q.codes)] = Flow({weight: own})

    jax.tree.map(follow, args, is_leaf=_has_codes)
    parts = jax.tree.leaves(args)
    return decoded_in_hlo(
        text, [flows.get(id(part), Flow(data=True)) for part in parts]
    )


def _flows_of_parts(q: ImplicitArray) -> dict[int, Flow]:
    """The flow of each part, by its `id`: codes are followed, other parts are not."""
    flows: dict[int, Flow] = {}
    for part in jax.tree.leaves(q, is_leaf=_has_codes):
        if _has_codes(part):
            flows |= {id(leaf): Flow() for leaf in jax.tree.leaves(part)}
            weight = _weight_of(part)
            flows[id(part.codes)] = Flow({weight: weight.decoded})
    return flows


def _has_codes(x: Any) -> bool:
    return isinstance(x, QuantizedArray) and x.is_whole


def _weight_of(q: QuantizedArray) -> Weight:
    decoded = num_codes(math.prod(q.codes.shape), q.format.bits)
    per_code = planes_of(q.format.bits)
    matrices = {q.size, decoded}
    if q.ndim > 2:
        matrices.add(math.prod(q.shape[1:]))
    stacked = math.prod(q.codes.shape[:-2])
    if stacked:
        matrices |= {q.size // stacked, decoded // stacked}
    return Weight(q.size, decoded, per_code, frozenset(matrices))


def _arrays(out: Any) -> list:
    return jax.tree.leaves(eqx.filter(out, eqx.is_array))


def _on_arrays(fn: Callable, args: tuple, kwargs: dict) -> tuple[Callable, Any]:
    """`fn` as a function of the arrays in its arguments, and with arrays as results."""
    dynamic, static = eqx.partition((args, kwargs), eqx.is_array)

    def call(dynamic):
        args, kwargs = eqx.combine(dynamic, static)
        return _arrays(fn(*args, **kwargs))

    return call, dynamic


@typed
def explain(
    fn: Callable, *args: Any, platform: str | None = None, **kwargs: Any
) -> str:
    """Say what becomes of each product with a quantized weight in a function.

    !!! Example

        ```python
        import eqquant
        import jax
        import jax.numpy as jnp

        w = eqquant.quantize(jax.random.normal(jax.random.key(0), (256, 128)), "int8")
        x = jnp.ones((5, 128))
        print(eqquant.debug.explain(lambda x, w: x @ w.T, x, w, platform="tpu"))
        ```

    **Arguments:**

    - `fn`: a function. It is traced, not run.
    - `*args`, `**kwargs`: its arguments.
    - `platform`: `"cpu"`, `"gpu"` or `"tpu"`; by default that of this process.
        Where arguments are on several devices, what each of them computes is told.

    **Returns:**

    A line for each product: the shapes, the format, the lowering and its variant, the
    reason for it, and to how many bits activations are rounded. A product that rounds
    activations is not exactly linear. `docs/precision.md`, `docs/cpu.md`,
    `docs/gpu.md` and `docs/tpu.md` list the lowerings and variants.
    """
    platform = jax.default_backend() if platform is None else platform
    call, dynamic = _on_arrays(fn, args, kwargs)
    devices = max(map(num_devices_of, jax.tree.leaves(dynamic)), default=1)
    lines = []
    for eqn in _equations(jax.make_jaxpr(call)(dynamic)):
        if eqn.primitive is quantized_dot_p:
            x, codes, scales = (var.aval for var in eqn.invars)
            out = eqn.outvars[0].aval
            matmul = eqn.params["matmul"]
            weight = repr(matmul.format)
            if matmul.compute != Compute():
                weight += f", {matmul.compute!r},"
            lines.append(
                f"{x.str_short()} by {weight} gives {out.str_short()}: "
                + lowering_of(
                    x,
                    codes,
                    scales,
                    platform=platform,
                    devices=1 if is_manual(x) else devices,
                    **eqn.params,
                )
            )
    return "\n".join(lines) if lines else "no product with a quantized weight"


def _equations(jaxpr: Any):
    jaxpr, _ = open_jaxpr(jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in subjaxprs(eqn.params):
            yield from _equations(inner)
