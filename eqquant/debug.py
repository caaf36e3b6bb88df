"""Tools to find out, and to prove, what happens to quantized arrays."""

import math
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._array import QuantizedArray
from ._callables import substitute
from ._compat import open_jaxpr, subjaxprs
from ._materialise import MaterialiseError


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


def materialised(fn: Callable, *args: Any, **kwargs: Any) -> list[str]:
    """Where [`eqquant.debug.assert_not_materialised`][] sees a whole weight."""
    sizes: set[int] = set()

    def watch(q: QuantizedArray):
        shape = q.shape
        sizes.add(math.prod(shape))
        if len(shape) > 2:
            sizes.add(math.prod(shape[1:]))
        return q.codes

    substitute((fn, args, kwargs), watch)
    sizes -= {0, 1}
    dynamic, static = eqx.partition((args, kwargs), eqx.is_array)

    def call(dynamic):
        args, kwargs = eqx.combine(dynamic, static)
        return jax.tree.leaves(eqx.filter(fn(*args, **kwargs), eqx.is_array))

    found = list(_in_jaxpr(jax.make_jaxpr(call)(dynamic), sizes, ""))
    lowered = jax.jit(call).lower(dynamic).as_text()
    return found + _in_stablehlo(lowered, sizes)


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
