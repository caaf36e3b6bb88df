"""A quantized model over a mesh."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from .._jax import typed
from ..arrays import is_implicit
from ..primitives import names_of
from ._quantizes_later import QuantizesLater
from ._specs import check_spec, specs_of
from ._split import is_array, Split


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
        For meshes with automatic axes; with explicit ones `out_sharding` of a product
        says it.

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
        if is_array(site.leaf):
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
            f"{caller}: scatter is for meshes with automatic axes, got {mesh}. Say how "
            "a result is split where it is computed, inside of `eqquant.quaxify`: "
            "`jnp.einsum(..., out_sharding=spec)`."
        )

    splits = [Split(mesh, spec, of_batch, scatter) for _, spec in pairs]
    structure = jax.tree.structure(tree, is_leaf=is_implicit)
    placed = [split(site.leaf) for split, (site, _) in zip(splits, pairs, strict=True)]
    return jax.tree.map(
        lambda x, splits: x.with_splits(splits) if _is_later(x) else x,
        jax.tree.unflatten(structure, placed),
        jax.tree.unflatten(structure, splits),
        is_leaf=lambda x: is_implicit(x) or _is_later(x),
    )


def _is_later(x: Any) -> bool:
    return isinstance(x, QuantizesLater)
