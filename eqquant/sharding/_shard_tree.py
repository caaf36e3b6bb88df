"""A quantized model over a mesh."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._jax import is_traced, typed
from ..arrays import is_implicit, is_quantized, QuantizedArray
from ..primitives import names_of, Plan
from ._specs import check_spec, specs_of


Tree = TypeVar("Tree")


@typed
def shard_tree(
    tree: Tree,
    mesh: Mesh | AbstractMesh,
    specs: Any = None,
    *,
    rules: Mapping | None = None,
    batch: str | Sequence[str] | None = None,
    scatter: Literal[-2, -1] | None = None,
) -> Tree:
    """Split a quantized model over a mesh, and tell its products how.

    Specs are those of the model before it was quantized. Each part of a quantized array
    is split as the array is. Then `jax.jit` over the mesh runs a kernel on every
    device, with the collectives of a dense model:

    - a weight split by its outputs needs none;
    - one split by what it contracts needs a sum, of float32;
    - one split over axes of `batch`, too (FSDP), is gathered first, as packed codes.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        from jax.sharding import AxisType, PartitionSpec as P

        mesh = jax.make_mesh(
            (1, jax.device_count()), ("data", "model"), axis_types=(AxisType.Auto,) * 2
        )
        model = eqquant.quantize_tree(
            eqx.nn.MLP(64, 64, 512, 2, key=jax.random.key(0)), "int8"
        )
        model = eqquant.shard_tree(
            model,
            mesh,
            rules={"layers.0.weight": P("model"), "layers.1.weight": P(None, "model")},
        )


        @eqx.filter_jit
        def logits(model, x):
            return jax.vmap(model)(x)


        y = logits(model, jax.numpy.ones((8, 64)))
        ```

    **Arguments:**

    - `tree`: any pytree, or a single array: quantized or not, with adapters or without.
        `jax.ShapeDtypeStruct`s stay what they are, and get a sharding: so you can
        compile ahead of time. Under `jit`, arrays are constrained.
    - `mesh`: a mesh; for abstract arrays and under `jit` an abstract one will do.
    - `specs`: a `PartitionSpec` for each array, in a pytree or in a prefix of one;
        None for what each device has a copy of.
    - `rules`: instead of `specs`: ordered `{pattern: PartitionSpec}` by path, with
        patterns as in [`eqquant.quantize_tree`][]. Each device has a copy of what no
        rule matches.
    - `batch`: the mesh axes that split the rows of activations. By default those that
        split no array of `tree`. With FSDP say which. Mesh axes of `batch` become the
        last of those that split an axis together.

    - `scatter`: the axis of results that is left split over the mesh axes of their sum,
        so that the sum is a reduce-scatter: -2 for the rows of activations, as sequence
        parallelism has it, or -1 for what a weight puts out. By default all of these
        devices have the sum, by an all-reduce; as they do if the axis does not divide.
        For meshes with automatic axes.

    **Returns:**

    The same, each array on its devices. On a mesh with automatic axes the `plan` of
    each quantized array says how it is split. It travels with the array through
    transposes, slices, `jax.vmap` and `lax.scan`. With explicit axes types say that.

    **Raises:**

    `ValueError` or `TypeError` if a spec does not fit; the message names the path, the
    axis, the mesh axes, and what would fit: the contracted axis is split between
    blocks.
    """
    caller = "shard_tree"
    kinds = set(mesh.axis_types)
    if AxisType.Manual in kinds:
        raise ValueError(f"{caller}: mesh must not have manual axes, got {mesh}.")
    pairs = list(specs_of(tree, specs, rules, caller))
    used: set[str] = set()
    for site, spec in pairs:
        if _is_array(site.leaf):
            check_spec(site.path, site.leaf, spec, mesh, caller)
            used.update(name for entry in spec for name in names_of(entry))
    if batch is None:
        batch = [name for name in mesh.axis_names if name not in used]
    of_batch = (batch,) if isinstance(batch, str) else tuple(batch)
    if unknown := set(of_batch) - set(mesh.axis_names):
        raise ValueError(
            f"{caller}: batch must name axes of the mesh, which are {mesh.axis_names}, "
            f"got {sorted(unknown)[0]!r}."
        )
    plans = AxisType.Explicit not in kinds
    if scatter is not None and not plans:
        raise ValueError(
            f"{caller}: scatter is for meshes with automatic axes, got {mesh}."
        )

    def place(leaf, spec):
        if not _is_array(leaf):
            return leaf
        if not is_implicit(leaf):
            return _put(leaf, spec, mesh, caller)
        specs = leaf.split_specs(_in_order(spec, of_batch), mesh)
        leaf = jax.tree.map(lambda x, s: _put(x, s, mesh, caller), leaf, specs)

        def planned(x, specs):
            if not isinstance(x, QuantizedArray):
                return x
            axes = [names_of(entry) for entry in specs.codes]
            axes += [()] * (x.codes.ndim - len(axes))
            plan = Plan(mesh.abstract_mesh, tuple(axes), of_batch, scatter)
            return x.with_plan(plan if plans else None)

        return jax.tree.map(planned, leaf, specs, is_leaf=is_quantized)

    placed = [place(site.leaf, spec) for site, spec in pairs]
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_implicit), placed)


def _is_array(x: Any) -> bool:
    return (
        is_implicit(x)
        or eqx.is_array(x)
        or isinstance(x, np.ndarray | jax.ShapeDtypeStruct)
    )


def _in_order(spec: PartitionSpec, batch: tuple[str, ...]) -> PartitionSpec:
    """What is gathered last, so that it leaves neighbours together."""
    return PartitionSpec(
        *(
            tuple(sorted(names_of(entry), key=lambda name: name in batch)) or None
            for entry in spec
        )
    )


def _put(x: Any, spec: PartitionSpec, mesh: Mesh | AbstractMesh, caller: str) -> Any:
    sharding = NamedSharding(mesh, spec)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if is_traced(x):
        if AxisType.Explicit in mesh.axis_types:
            return jax.sharding.reshard(x, sharding)
        return lax.with_sharding_constraint(x, sharding)
    if isinstance(mesh, AbstractMesh):
        raise TypeError(
            f"{caller}: an abstract mesh has no devices to put arrays on. Give a "
            "jax.sharding.Mesh, or abstract arrays: jax.eval_shape makes them."
        )
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # Not over processes otherwise.
        data = jax.device_put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.device_put(x, sharding)
