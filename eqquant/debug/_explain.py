"""The kernel of each product of a function."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._jax import (
    is_manual,
    Literal,
    num_devices_of,
    open_jaxpr,
    split_scan,
    subjaxprs,
    typed,
)
from ..kernels import Compute
from ..primitives import (
    codes_dot_p,
    lowering_of,
    lowering_of_codes,
    quantized_dot_p,
    unflatten,
)
from ..training.rounded import jaxpr_of_product, low_precision_dot_p
from ._inspect import on_arrays, path_of


@typed
def explain(
    fn: Callable, *args: Any, platform: str | None = None, **kwargs: Any
) -> str:
    """Describe the kernel of each product with a quantized weight, and of each product
    in low precision, in a function.

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

    For a training step in low precision (see [`eqquant.training.low_precision`][]),
    each line has the types of both operands. If the chip does not multiply these
    types, the line states the type to which XLA converts them.

    `docs/internals/kernels.md` lists the kernels.
    """
    platform = jax.default_backend() if platform is None else platform
    call, dynamic = on_arrays(fn, args, kwargs)
    devices = max(map(num_devices_of, jax.tree.leaves(dynamic)), default=1)
    paths = [_path(keys) for keys, _ in jax.tree.leaves_with_path(dynamic)]
    lines: dict[str, list[str]] = {}
    weights = [_Codes(path) for path in paths]
    for eqn, weight in _products(jax.make_jaxpr(call)(dynamic), weights):
        x, codes, *parts = (var.aval for var in eqn.invars)
        out = eqn.outvars[0].aval
        here = 1 if is_manual(x) else devices
        if eqn.primitive is codes_dot_p:
            over, has = eqn.params["over"], eqn.params["has"]
            by = lowering_of_codes(
                x, codes, over=over, has=has, platform=platform, devices=here
            )
            line = f"{x.str_short()} by {codes.str_short()} gives {out.str_short()}"
            lines.setdefault(f"{line}: {by}", []).append("")
            continue
        (scales, _), view = unflatten(codes, parts, eqn.params["stored"])
        matmul = eqn.params["matmul"]
        by = repr(matmul.format)
        if matmul.compute != Compute():
            by += f", {matmul.compute!r},"
        line = f"{x.str_short()} by {by} gives {out.str_short()}: " + lowering_of(
            x,
            codes,
            scales,
            platform=platform,
            devices=here,
            matmul=matmul,
            plan=eqn.params["plan"],
            view=view,
        )
        if view is None and weight.is_slice:
            line += ", copies its weight out of a stack (see eqquant.trees.scan_layers)"
        lines.setdefault(line, []).append(weight.path)
    if not lines:
        return "no product with a quantized weight, or in low precision"
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
    *array, part = keys
    return path_of(array) if getattr(part, "name", None) == "codes" else ""


class _Codes(NamedTuple):
    """An array whose elements are codes: the path of its weight, and whether it was
    sliced out of a stack inside of a program. Other arrays have no path."""

    path: str = ""
    is_slice: bool = False


def _products(jaxpr: Any, inputs: Sequence[_Codes]) -> Iterator[tuple[Any, _Codes]]:
    """Yield each product with its codes."""
    jaxpr, _ = open_jaxpr(jaxpr)
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    none = _Codes()
    read = lambda var: none if isinstance(var, Literal) else known.get(var, none)
    for eqn in jaxpr.eqns:
        operands, name = list(map(read, eqn.invars)), eqn.primitive.name
        if eqn.primitive in (quantized_dot_p, codes_dot_p):
            yield eqn, operands[1]
            continue
        if eqn.primitive is low_precision_dot_p:
            yield from _products(jaxpr_of_product(eqn), operands)
            continue
        # Slices and reshapes of codes have 8 bits. Results of products do not.
        moved = next((codes for codes in operands if codes.path), none)
        if name in ("dynamic_slice", "slice", "gather"):
            moved = moved._replace(is_slice=True)
        for var in eqn.outvars:
            is_codes = getattr(var.aval, "dtype", None) in (jnp.uint8, jnp.int8)
            known[var] = moved if is_codes else none
        if name == "scan":
            first = len(operands) - len(split_scan(eqn.params, operands)[2])
            sliced = (codes._replace(is_slice=True) for codes in operands[first:])
            operands[first:] = sliced
        for inner in subjaxprs(eqn.params):
            # Inputs of loops and branches come last.
            count = len(open_jaxpr(inner)[0].invars)
            last = [*[none] * count, *operands][-count:] if count else []
            yield from _products(inner, last)
