"""Shardings of the model in `model.py` and of its activations over a mesh.

    mesh = jax.make_mesh((4, 8, 1), AXES, axis_types=(AxisType.Auto,) * 3)
    layout = Layout(mesh)
    model = eqquant.shard_tree(model, mesh, rules=layout.rules(), batch="data")
    logits = model(tokens, layout=layout)

The mesh has three axes:

- `"data"` splits sequences. With `fsdp` it also splits weights, which are gathered in
    packed form before each use;
- `"heads"` splits key heads, their queries, and the MLP. It is at most the number of
    key heads;
- `"group"` splits queries and the MLP further. In attention it splits sequences.

So each key and value is on exactly one device.
"""

import dataclasses
from collections.abc import Callable

import jax
from jax import lax
from jax.experimental.layout import Layout as Order, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float


AXES = ("data", "heads", "group")
_SPLIT = ("heads", "group")  # The axes that split a layer.
_ROWS = ("data", "group", "heads")  # The axes that split the head axis of a cache.


def _as_it_is(x):
    """Keep the memory layout in the order of the axes."""
    return with_layout_constraint(x, Order(tuple(range(x.ndim))))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shardings over a mesh with the axes `AXES`.

    With `by_tokens`, activations between layers are also split by tokens (sequence
    parallelism), so that the saved residuals of training are small. Use one sequence
    per device of `"data"`. With more, sums are scattered by sequences first, and moved
    afterwards.
    """

    mesh: Mesh | AbstractMesh
    fsdp: bool = False
    by_tokens: bool = False

    def rules(self) -> dict[str, P]:
        """Return the rules of `eqquant.shard_tree` for a model with stacked layers."""
        gathered = "data" if self.fsdp else None
        return {
            "embedding.weight": P(_SPLIT, gathered),
            "head.weight": P(_SPLIT, gathered),
            "*.key.weight": P(None, "heads", gathered),
            "*.value.weight": P(None, "heads", gathered),
            "*.query.weight": P(None, _SPLIT, gathered),
            "*.gate.weight": P(None, _SPLIT, gathered),
            "*.up.weight": P(None, _SPLIT, gathered),
            "*.output.weight": P(None, gathered, _SPLIT),
            "*.down.weight": P(None, gathered, _SPLIT),
        }

    @property
    def scatter(self) -> int | None:
        """Return the `scatter` of `eqquant.shard_tree`: a device sums its own
        tokens."""
        return -2 if self.by_tokens else None

    def tokens(self) -> NamedSharding:
        """Constrain tokens, `(batch, length)`."""
        return NamedSharding(self.mesh, P("data"))

    def cache(self) -> NamedSharding:
        """Constrain keys and values, `(layers, heads, ...)`.

        The heads of a device are neighbours. Only `attention` depends on their order.
        """
        return NamedSharding(self.mesh, P(None, _ROWS))

    def between_layers(
        self, x: Float[Array, "batch length size"]
    ) -> Float[Array, "batch length size"]:
        return self._put(x, P("data", _SPLIT if self.by_tokens else None))

    def within_layer(
        self, x: Float[Array, "batch length size"]
    ) -> Float[Array, "batch length size"]:
        """Constrain activations within a layer: a device has all features of its
        tokens."""
        return self._put(x, P("data"))

    def attention(self, attend: Callable) -> Callable:
        """Run `attend` on the sequences and heads of each device."""

        def call(queries, keys, values, view, cache, layer, start):
            heads = P(("data", "group"), "heads")
            of_view = jax.tree.map(lambda _: P(), view)
            if view.mask.shape[0] > 1:
                of_view = dataclasses.replace(of_view, mask=heads)
            of_cache = jax.tree.map(lambda _: self.cache().spec, cache)

            def local(*args):
                y, cache = attend(*args)
                # Otherwise XLA prefers another layout for new rows, and copies the
                # cache.
                return y, jax.tree.map(_as_it_is, cache)

            # The sharding of products; otherwise XLA gathers dense weights for few
            # sequences.
            queries = self._put(queries, P("data", _SPLIT))
            keys, values = (self._put(x, P("data", "heads")) for x in (keys, values))
            y, cache = jax.shard_map(
                local,
                mesh=self.mesh,
                in_specs=(heads, heads, heads, of_view, of_cache, P(), P()),
                out_specs=(heads, of_cache),
                check_vma=False,
            )(queries, keys, values, view, cache, layer, start)
            return self._put(y, P("data", _SPLIT)), cache

        return call

    def _put(self, x, spec: P):
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
