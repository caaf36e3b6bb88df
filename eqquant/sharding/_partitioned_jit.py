"""`jax.jit`, where the compiler's own propagation says how products are split."""

import dataclasses
import functools as ft
from collections.abc import Callable, Hashable
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex_core
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from .._jax import propagate, rewrite, trace_context, typed
from ..primitives import Mark, quantized_dot_p, scale_gradient_p


@typed
def partitioned_jit(fn: Callable, *, donate_argnums: tuple[int, ...] = ()) -> Any:
    """Compile a function over a mesh, with no plan for its quantized weights.

    Arrays may be put on their devices in any way: `jax.device_put`, `eqx.filter_shard`,
    sharding constraints. Shardy, the part of the compiler that decides how all else is
    split, is asked how it would split each product; then a kernel runs on every device,
    as with the plans of [`eqquant.shard_tree`][].

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import jax.numpy as jnp
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

        mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
        w = eqquant.quantize(jax.random.normal(jax.random.key(0), (512, 256)), "nf4")
        w = jax.device_put(w, NamedSharding(mesh, P("x")))


        @eqquant.partitioned_jit
        def product(w, x):
            return w @ x


        y = product(w, jnp.ones(256))
        ```

    The function is traced once, and lowered twice for each new combination of shapes,
    dtypes and shardings. The first time products are marked, Shardy propagates
    shardings over the program, and what reaches the marks is read. Plans that arrays
    have already are kept.

    **Arguments:**

    - `fn`: any function of pytrees, with loops, gradients and `jax.vmap` in it. As with
        `eqx.filter_jit` arrays are traced, and all else is static and must be hashable.
    - `donate_argnums`: positions of arguments whose arrays may be overwritten.

    **Returns:**

    The compiled function. Its method `lower`, of the same arguments or of abstract ones
    with shardings, gives a `jax.stages.Lowered` of the arrays among them.

    On one device, and on a mesh with explicit axes, it is a plain `jax.jit`.

    **Raises:**

    `ValueError` if arguments are on meshes of different shapes or names of axes, or if
    `jax_use_shardy_partitioner` is off.

    !!! warning

        This takes interfaces of JAX that may change. [`eqquant.shard_tree`][] does not,
        and compiles once.
    """
    return _Partitioned(fn, donate_argnums)


@dataclasses.dataclass(frozen=True)
class _Signature:
    """What a program is compiled for: arguments without the values of arrays."""

    structure: Any
    leaves: tuple[Hashable, ...]
    context: Hashable

    def filled(self, arrays: Any) -> Any:
        """Arguments with these arrays, in a pytree or in a tuple of its leaves."""
        arrays = iter(jax.tree.leaves(arrays))
        leaves = [
            next(arrays) if isinstance(leaf, _Type) else leaf for leaf in self.leaves
        ]
        return jax.tree.unflatten(self.structure, leaves)


@dataclasses.dataclass(frozen=True)
class _Type:
    """Of an array."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    sharding: Any

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        how = {"sharding": self.sharding, "weak_type": self.weak_type}
        return jax.ShapeDtypeStruct(self.shape, self.dtype, **how)


class _Partitioned:
    def __init__(self, fn: Callable, donate_argnums: tuple[int, ...]):
        ft.update_wrapper(self, fn)
        self._fn = fn
        self._donate = donate_argnums
        self._program = ft.cache(self._new_program)

    def __call__(self, *args, **kwargs):
        run, finish = self._program(_signature(args, kwargs))
        args, kwargs = eqx.filter((args, kwargs), _is_array)
        return finish(run(*args, **kwargs))

    def lower(self, *args, **kwargs) -> jax.stages.Lowered:
        run, _ = self._program(_signature(args, kwargs))
        args, kwargs = eqx.filter((args, kwargs), _is_array)
        return run.lower(*args, **kwargs)

    def _new_program(self, signature: _Signature) -> tuple[Any, Callable]:
        """The compiled function of the arrays in the arguments, and one that gives its
        results their structure."""
        types = [leaf for leaf in signature.leaves if isinstance(leaf, _Type)]
        structs = [leaf.struct for leaf in types]
        of_results = []

        def flat(*arrays):
            args, kwargs = signature.filled(arrays)
            out, static = eqx.partition(self._fn(*args, **kwargs), eqx.is_array)
            leaves, structure = jax.tree.flatten(out)
            of_results.append((structure, static))
            return leaves

        closed = jax.make_jaxpr(flat)(*structs)
        structure, static = of_results[-1]
        mesh = _mesh_of([leaf.sharding for leaf in types])
        if mesh is not None:
            closed = _planned(closed, structs, mesh)
        call = jex_core.jaxpr_as_fun(closed)
        run = jax.jit(
            lambda *args, **kwargs: call(*jax.tree.leaves((args, kwargs))),
            donate_argnums=self._donate,
        )

        def finish(leaves):
            return eqx.combine(jax.tree.unflatten(structure, leaves), static)

        return run, finish


def _is_array(x: Any) -> bool:
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def _signature(args: tuple, kwargs: dict) -> _Signature:
    leaves, structure = jax.tree.flatten((args, kwargs))

    def of(x):
        if not _is_array(x):
            return x
        weak = getattr(x, "weak_type", False)
        sharding = getattr(x, "sharding", None)
        committed = not isinstance(x, jax.Array) or getattr(x, "committed", True)
        return _Type(x.shape, x.dtype, weak, sharding if committed else None)

    return _Signature(structure, tuple(map(of, leaves)), trace_context())


def _mesh_of(shardings: list) -> AbstractMesh | None:
    """That over which arguments are split, if its axes are automatic."""
    named = (x for x in shardings if isinstance(x, NamedSharding))
    meshes = {x.mesh.abstract_mesh for x in named if x.mesh.size > 1}
    if len(meshes) > 1:
        raise ValueError(
            "partitioned_jit: all arguments must be on the same mesh, got "
            f"{' and '.join(map(str, meshes))}."
        )
    (mesh,) = meshes or {None}
    return None if mesh is None or AxisType.Explicit in mesh.axis_types else mesh


def _planned(closed: Any, structs: list, mesh: AbstractMesh) -> Any:
    """The same jaxpr, in which products have the plans that Shardy would have."""
    products = []

    def marked(eqn):
        if not _is_without_plan(eqn):
            return None
        products.append(eqn)
        return eqn.params | {"plan": Mark(len(products) - 1)}

    with_marks = jex_core.jaxpr_as_fun(rewrite(closed, marked))
    found = propagate(jax.jit(with_marks).lower(*structs))
    numbers = iter(range(len(products)))

    def planned(eqn):
        if not _is_without_plan(eqn):
            return None
        codes = eqn.invars[1 if eqn.primitive is quantized_dot_p else 2].aval
        plan = Mark(next(numbers)).plan(found, mesh, codes.ndim)
        return eqn.params | {"plan": plan}

    return rewrite(closed, planned)


def _is_without_plan(eqn: Any) -> bool:
    products = quantized_dot_p, scale_gradient_p
    return eqn.primitive in products and eqn.params["plan"] is None
