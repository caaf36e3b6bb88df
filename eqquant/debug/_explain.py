"""The kernel of each product of a function."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import is_manual, Literal, num_devices_of, open_jaxpr, subjaxprs, typed
from ..kernels import Compute
from ..primitives import lowering_of, quantized_dot_p
from ._inspect import on_arrays


@typed
def explain(
    fn: Callable, *args: Any, platform: str | None = None, **kwargs: Any
) -> str:
    """Describe the kernel of each product with a quantized weight in a function.

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
    - `platform`: `"cpu"`, `"gpu"` or `"tpu"`. The default is the platform of this
        process. For arguments on several devices, the result describes one device.

    **Returns:**

    A line for each kind of product: the shapes, the format, the kernel and its variant,
    the reason for the choice, and the bits of rounded activations. A line ends with the
    number of equal products, if there are several, and the paths of their weights in
    the arguments. A product that rounds activations is not exactly linear.
    `docs/internals/kernels.md` lists the kernels.
    """
    platform = jax.default_backend() if platform is None else platform
    call, dynamic = on_arrays(fn, args, kwargs)
    devices = max(map(num_devices_of, jax.tree.leaves(dynamic)), default=1)
    paths = [_path(keys) for keys, _ in jax.tree.leaves_with_path(dynamic)]
    lines: dict[str, list[str]] = {}
    for eqn, path in _products(jax.make_jaxpr(call)(dynamic), paths):
        x, codes, *parts = (var.aval for var in eqn.invars)
        scales, _ = eqn.params["stored"].unflatten(parts)
        out = eqn.outvars[0].aval
        matmul = eqn.params["matmul"]
        weight = repr(matmul.format)
        if matmul.compute != Compute():
            weight += f", {matmul.compute!r},"
        line = f"{x.str_short()} by {weight} gives {out.str_short()}: " + lowering_of(
            x,
            codes,
            scales,
            platform=platform,
            devices=1 if is_manual(x) else devices,
            matmul=matmul,
            plan=eqn.params["plan"],
        )
        lines.setdefault(line, []).append(path)
    if not lines:
        return "no product with a quantized weight"
    return "\n".join(line + _weights(paths) for line, paths in lines.items())


def _weights(paths: Sequence[str]) -> str:
    """Return the end of a line: the number of products, and the paths of weights."""
    count = f"{len(paths)} products" if len(paths) > 1 else ""
    names = ", ".join(dict.fromkeys(filter(None, paths)))
    end = ": ".join(filter(None, (count, names)))
    return f" [{end}]" if end else ""


def _path(keys: Sequence[Any]) -> str:
    """Return the path of a quantized array from the path of its codes in `(args,
    kwargs)`; otherwise an empty string."""
    names = [
        str(next(getattr(k, a) for a in ("name", "key", "idx") if hasattr(k, a)))
        for k in keys
    ]
    if names[-1] != "codes":
        return ""
    return ".".join(names[2:-1]) or f"argument {names[1]}"


def _products(jaxpr: Any, paths: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """Yield each product with the path of its weight. `paths` has the path of each
    input whose elements are codes, or an empty string."""
    jaxpr, _ = open_jaxpr(jaxpr)
    known = dict(zip(jaxpr.invars, paths, strict=True))
    path_of = lambda var: "" if isinstance(var, Literal) else known.get(var, "")
    for eqn in jaxpr.eqns:
        inputs = list(map(path_of, eqn.invars))
        if eqn.primitive is quantized_dot_p:
            yield eqn, inputs[1]
            continue
        # Slices and reshapes of codes have 8 bits. Results of products do not.
        moved = next(filter(None, inputs), "")
        for var in eqn.outvars:
            is_codes = getattr(var.aval, "dtype", None) in (jnp.uint8, jnp.int8)
            known[var] = moved if is_codes else ""
        for inner in subjaxprs(eqn.params):
            # Inputs of loops and branches come last.
            count = len(open_jaxpr(inner)[0].invars)
            last = [*[""] * count, *inputs][-count:] if count else []
            yield from _products(inner, last)
