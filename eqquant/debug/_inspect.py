"""What a function does to the quantized arrays in it."""

import math
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._jax import open_jaxpr, subjaxprs
from ..arrays import ImplicitArray, is_quantized, MaterialiseError, QuantizedArray
from ..dispatch import substitute
from ..primitives import lowering_of, quantized_dot_p


# What happens inside of these is their own business: a kernel decodes tile by tile.
_kernels = ("pallas_call", "tpu_custom_call")


def assert_not_materialised(fn: Callable, *args: Any, **kwargs: Any) -> None:
    """Check that calling a function never holds a whole quantized array in floating
    point.

    The function is traced and lowered, not run. Nothing floating point may have as many
    elements as a quantized array in `fn` or its arguments, or as one of the matrices
    of a stack: not in the jaxpr, and not in what the primitive is lowered to for this
    platform. Numbers of elements are all it looks at, so choose sizes at which no
    activation is as large as a weight.

    !!! Example

        ```python
        import eqquant
        import jax
        import jax.numpy as jnp

        w = eqquant.quantize(jax.random.normal(jax.random.key(0), (211, 128)), "nf4")
        x = jnp.ones((5, 128))
        eqquant.debug.assert_not_materialised(lambda x, w: x @ w.T, x, w)
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


def assert_trainable(tree: Any) -> None:
    """Check that a pytree has nothing of a quantized array in it: before it is given to
    an optimiser, or differentiated.

    Codes are integers, and have no gradient; scales have one, but to train them (or to
    decay them, as AdamW does) is rarely meant. JAX and optax cannot tell.

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
    """Where [`eqquant.debug.assert_not_materialised`][] sees a whole weight."""
    sizes: set[int] = set()

    def watch(q: ImplicitArray):
        if any(map(is_quantized, jax.tree.leaves(q, is_leaf=is_quantized))):
            shape = q.shape
            sizes.add(math.prod(shape))
            if len(shape) > 2:
                sizes.add(math.prod(shape[1:]))
        # Anything else, so that what holds it counts as changed.
        return jax.tree.leaves(q)[0]

    substitute((fn, args, kwargs), watch)
    sizes -= {0, 1}
    call, dynamic = _on_arrays(fn, args, kwargs)
    found = list(_in_jaxpr(jax.make_jaxpr(call)(dynamic), sizes, ""))
    lowered = jax.jit(call).lower(dynamic).as_text()
    return found + _in_stablehlo(lowered, sizes)


def _on_arrays(fn: Callable, args: tuple, kwargs: dict) -> tuple[Callable, Any]:
    """`fn` as a function of the arrays in its arguments, and with arrays as results."""
    dynamic, static = eqx.partition((args, kwargs), eqx.is_array)

    def call(dynamic):
        args, kwargs = eqx.combine(dynamic, static)
        return jax.tree.leaves(eqx.filter(fn(*args, **kwargs), eqx.is_array))

    return call, dynamic


def _in_jaxpr(jaxpr: Any, sizes: set[int], path: str):
    jaxpr, _ = open_jaxpr(jaxpr)
    for eqn in jaxpr.eqns:
        name = f"{path}{eqn.primitive.name}"
        if eqn.primitive.name in _kernels:
            continue
        for var in eqn.outvars:
            aval = var.aval
            if not jnp.issubdtype(getattr(aval, "dtype", jnp.int32), jnp.floating):
                continue
            if math.prod(aval.shape) in sizes:
                yield f"{name} -> {aval.str_short()}"
        for inner in subjaxprs(eqn.params):
            yield from _in_jaxpr(inner, sizes, f"{name}/")


_tensor = re.compile(r"tensor<((?:\d+x)+)(f64|f32|bf16|f16|f8\w+)>")


def _in_stablehlo(text: str, sizes: set[int]) -> list[str]:
    found = {
        f"{dims}{dtype}"
        for dims, dtype in _tensor.findall(text)
        if math.prod(map(int, dims[:-1].split("x"))) in sizes
    }
    return [f"lowered: tensor<{tensor}>" for tensor in sorted(found)]


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
        Over several TPUs, outside of `jax.shard_map`, a product gets XLA's lowering,
        which the compiler can split; inside, that of a single TPU.

    **Returns:**

    A line for each product: the shapes, the format, and which lowering, in which
    variant, for what reason. `docs/precision.md` and `docs/tpu.md` say what they are.
    """
    platform = jax.default_backend() if platform is None else platform
    call, dynamic = _on_arrays(fn, args, kwargs)
    lines = []
    for eqn in _equations(jax.make_jaxpr(call)(dynamic)):
        if eqn.primitive is quantized_dot_p:
            x, codes, scales = (var.aval for var in eqn.invars)
            out = eqn.outvars[0].aval
            lines.append(
                f"{x.str_short()} by {eqn.params['format']!r} gives {out.str_short()}: "
                + lowering_of(x, codes, scales, platform=platform, **eqn.params)
            )
    return "\n".join(lines) if lines else "no product with a quantized weight"


def _equations(jaxpr: Any):
    jaxpr, _ = open_jaxpr(jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in subjaxprs(eqn.params):
            yield from _equations(inner)
