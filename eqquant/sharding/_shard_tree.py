"""Sharding of a quantized model over a mesh."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from .._jax import typed
from ..arrays import is_implicit
from ..partition import names_of
from ._specs import check_spec, specs_of
from ._split import is_array, QuantizesLater, Split


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
    """Shard a quantized model over a mesh, including its products.

    You pass the specs of the model before quantization. Each component of a quantized
    array is sharded like the array. `jax.jit` then runs a kernel on every device, with
    the collectives of a dense model:

    - a weight that is split by its outputs needs no collective;
    - a weight that is split by its contracted axis needs a sum, in float32 (bfloat16
        results on TPUs: in bfloat16);
    - a weight that is also split over axes of `batch` (FSDP) is gathered first, as
        packed codes.

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

    - `tree`: any pytree or array, quantized or not, with or without adapters.
        `jax.ShapeDtypeStruct`s receive a sharding, for ahead-of-time compilation. Under
        `jit`, arrays receive a sharding constraint.
    - `mesh`: a mesh. An abstract mesh suffices for abstract arrays and under `jit`.
    - `specs`: a pytree, or a prefix of one, with a `PartitionSpec` for each array. None
        replicates an array.
    - `rules`: instead of `specs`, an ordered mapping `{pattern: PartitionSpec}`, with
        patterns like in [`eqquant.quantize_tree`][]. Arrays without a matching rule are
        replicated.
    - `batch`: the mesh axes that split the rows of activations. By default, the mesh
        axes that split no array of `tree`. FSDP requires this argument. If several
        mesh axes split an axis, the axes of `batch` come last.
    - `scatter`: the axis of results to scatter over the mesh axes of their sum
        (reduce-scatter): -2 for the rows of activations (sequence parallelism), or -1
        for the outputs of a weight. Every device has the sum (all-reduce) with None,
        and for sizes that are not divisible. This argument is for meshes with automatic
        axes. On meshes with explicit axes, use `out_sharding` of a product.

    **Returns:**

    The tree, with each array on its devices. On a mesh with automatic axes, the field
    `plan` of each quantized array contains its sharding, which transposes, slices,
    `jax.vmap` and `lax.scan` preserve. With explicit axes, types contain the sharding.

    **Raises:**

    `ValueError` or `TypeError` if a spec does not fit. The message names the path, the
    axis, the mesh axes, and the numbers of parts that fit, because a contracted axis is
    only split between blocks.
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
    batch_axes = (batch,) if isinstance(batch, str) else tuple(batch)
    if unknown := set(batch_axes) - set(mesh.axis_names):
        raise ValueError(
            f"{caller}: batch must name axes of the mesh, which are {mesh.axis_names}, "
            f"got {sorted(unknown)[0]!r}."
        )
    plans = AxisType.Explicit not in kinds
    if scatter is not None and not plans:
        raise ValueError(
            f"{caller}: scatter is for meshes with automatic axes, got {mesh}. "
            "Pass the sharding of a result to its product, inside of "
            "`eqquant.quaxify`: `jnp.einsum(..., out_sharding=spec)`."
        )

    splits = [Split(mesh, spec, batch_axes, scatter) for _, spec in pairs]
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
