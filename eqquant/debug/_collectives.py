"""The collectives of a compiled program."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .._jax import typed
from ._in_hlo import arrays_in, instructions_of
from ._inspect import on_arrays


_kinds = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all"),
    *("collective-permute", "collective-broadcast", "ragged-all-to-all"),
)
# The results of these asynchronous collectives contain their operands.
_with_operands = ("all-gather-start", "collective-permute-start")


class Collective(NamedTuple):
    """An array that a collective moves between devices.

    !!! Example

        ```python
        import eqquant
        import jax.numpy as jnp

        moved = eqquant.debug.collectives(jnp.sin, jnp.ones(8))
        assert sum(collective.nbytes for collective in moved) == 0
        ```

    **Fields:**

    - `kind`: `"all-gather"`, `"all-reduce"`, `"reduce-scatter"`, `"all-to-all"`,
        `"collective-permute"` or `"collective-broadcast"`.
    - `dtype`, `shape`: the result on one device, in the notation of XLA: `"u8"` for
        packed codes, `"f32"`, `"bf16"`.
    - `nbytes`: the bytes of the result on one device.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@typed
def collectives(fn: Callable, *args: Any, **kwargs: Any) -> list[Collective]:
    """List the arrays that a compiled function gathers, reduces and permutes.

    [`eqquant.debug.assert_not_materialised`][] also passes if a device gathers a whole
    weight as packed codes. This function shows such a transfer. The function is
    compiled for the devices of its arguments, but not run.

    !!! Example

        ```python
        import eqquant
        import jax
        import jax.numpy as jnp
        from jax.sharding import AxisType, PartitionSpec as P

        mesh = jax.make_mesh((jax.device_count(),), ("m",), axis_types=(AxisType.Auto,))
        w = eqquant.quantize(jax.random.normal(jax.random.key(0), (64, 512)), "int8")
        w = eqquant.shard_tree(w, mesh, P("m"))
        moved = eqquant.debug.collectives(lambda x, w: x @ w.T, jnp.ones((8, 512)), w)
        # No device gathers codes.
        assert not [c for c in moved if c.kind == "all-gather" and c.dtype == "s8"]
        ```

    **Arguments:**

    - `fn`: a function.
    - `*args`, `**kwargs`: its arguments, sharded like in the real call. They may be
        `jax.ShapeDtypeStruct`s with shardings.

    **Returns:**

    A list of [`eqquant.debug.Collective`][], the largest first. A collective inside of
    a loop is listed once.
    """
    call, dynamic = on_arrays(fn, args, kwargs)
    text = jax.jit(call).lower(dynamic).compile().as_text() or ""
    found = []
    for operation, shape in instructions_of(text):
        kind = operation.removesuffix("-start")
        if kind not in _kinds:
            continue
        arrays = [(dtype, tuple(dims)) for dtype, dims in arrays_in(shape)]
        if operation in _with_operands:
            # Some collectives also carry counters.
            arrays = [a for a in arrays if a[1]] or arrays
            arrays = arrays[len(arrays) // 2 :]
        for dtype, dims in arrays:
            nbytes = math.ceil(math.prod(dims) * _bits(dtype) / 8)
            found.append(Collective(kind, dtype, dims, nbytes))
    return sorted(found, key=lambda collective: -collective.nbytes)


def _bits(dtype: str) -> int:
    """Return the bits of a dtype of XLA, such as `u8`, `bf16`, `f8e4m3fn` or `pred`."""
    digits = "".join(c if c.isdigit() else " " for c in dtype).split()
    return int(digits[0]) if digits else 8
