"""The sharding of one array: its placement, and the plan of its products."""

import abc
import dataclasses
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._jax import is_traced
from ..arrays import is_implicit, QuantizedArray
from ..partition import names_of, Plan


Self = TypeVar("Self", bound="QuantizesLater")


def is_array(x: Any) -> bool:
    return (
        is_implicit(x)
        or eqx.is_array(x)
        or isinstance(x, np.ndarray | jax.ShapeDtypeStruct)
    )


@dataclasses.dataclass(frozen=True)
class Split:
    """The arguments of `shard_tree` for one array.

    **Fields:**

    - `mesh`, `batch`, `scatter`: as in [`eqquant.shard_tree`][].
    - `spec`: the spec of the array before quantization.
    """

    mesh: Mesh | AbstractMesh
    spec: PartitionSpec
    batch: tuple[str, ...] = ()
    scatter: Literal[-2, -1] | None = None

    def __call__(self, leaf: Any) -> Any:
        """Place or constrain an array. On a mesh with automatic axes, each quantized
        array in it receives a plan."""
        if not is_array(leaf):
            return leaf
        if not is_implicit(leaf):
            return _put(leaf, self.spec, self.mesh)
        specs = leaf.split_specs(self._in_order(), self.mesh)
        leaf = jax.tree.map(lambda x, spec: _put(x, spec, self.mesh), leaf, specs)
        has_codes = lambda x: isinstance(x, QuantizedArray)
        return jax.tree.map(self._planned, leaf, specs, is_leaf=has_codes)

    def _planned(self, x: Any, specs: Any) -> Any:
        if not isinstance(x, QuantizedArray):
            return x
        if AxisType.Explicit in self.mesh.axis_types:  # Types contain the sharding.
            return x.with_plan(None)
        axes = [names_of(entry) for entry in specs.codes]
        axes += [()] * (x.codes.ndim - len(axes))
        mesh = self.mesh.abstract_mesh
        over = {
            axis: mesh.axis_names if axis == self.scatter else () for axis in (-2, -1)
        }
        scatter = over[-2], over[-1]
        return x.with_plan(Plan(mesh, tuple(axes), self.batch, scatter))

    def _in_order(self) -> PartitionSpec:
        """Return the spec with gathered mesh axes last, so that neighbours stay
        together."""
        return PartitionSpec(
            *(
                tuple(sorted(names_of(entry), key=lambda name: name in self.batch))
                or None
                for entry in self.spec
            )
        )


class QuantizesLater(eqx.Module):
    """A module that quantizes its arrays later.

    It stores the sharding of each array, and applies it to the quantized arrays.
    """

    @abc.abstractmethod
    def with_splits(self: Self, splits: Any) -> Self:
        """Return the module with a sharding for each array.

        `splits` is a tree of the same structure with a [`Split`][] for each array.
        Raises `ValueError` if a sharding does not fit.
        """


def _put(x: Any, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> Any:
    sharding = NamedSharding(mesh, spec)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if is_traced(x):
        if AxisType.Explicit in mesh.axis_types:
            return jax.sharding.reshard(x, sharding)
        return lax.with_sharding_constraint(x, sharding)
    if isinstance(mesh, AbstractMesh):
        raise TypeError(
            "shard_tree: an abstract mesh has no devices to put arrays on. Give a "
            "jax.sharding.Mesh, or abstract arrays: jax.eval_shape makes them."
        )
    # `device_put` does not place keys over several processes.
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.device_put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.device_put(x, sharding)
