"""How a model and what it computes are split over a mesh, for `model.py`.

    mesh = jax.make_mesh((4, 8, 1), AXES, axis_types=(AxisType.Auto,) * 3)
    layout = Layout(mesh)
    model = eqquant.shard_tree(model, mesh, rules=layout.rules(), batch="data")
    logits = model(tokens, layout=layout)

The mesh has three axes:

- `"data"` splits sequences. With `fsdp` it splits weights as well, which are gathered,
    packed, before they are used;
- `"heads"` splits heads of keys, the queries that look at them, and the MLP: no more
    than there are heads of keys;
- `"group"` splits queries and the MLP further. Attention has other sequences there.

So each key and value is on one device, whatever the number of devices.
"""

import dataclasses
from collections.abc import Callable

import jax
from jax import lax
from jax.experimental.layout import Layout as Order, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float


AXES = ("data", "heads", "group")
_SPLIT = ("heads", "group")  # What splits a layer.
_ROWS = ("data", "group", "heads")  # The heads of all sequences, in a cache.


def _as_it_is(x):
    """In memory in the order of its axes."""
    return with_layout_constraint(x, Order(tuple(range(x.ndim))))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Over a mesh with the axes `AXES`.

    With `by_tokens` what is between layers is split by tokens as well (sequence
    parallelism): the residuals that training keeps are then small. Use as many
    sequences as `"data"` has devices. With more, sums are split by sequences first, and
    then moved.
    """

    mesh: Mesh | AbstractMesh
    fsdp: bool = False
    by_tokens: bool = False

    def rules(self) -> dict[str, P]:
        """For `eqquant.shard_tree`, of a model with stacked layers."""
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
        """For `eqquant.shard_tree`: each device sums up its own tokens."""
        return -2 if self.by_tokens else None

    def tokens(self) -> NamedSharding:
        """Of `(batch, length)`."""
        return NamedSharding(self.mesh, P("data"))

    def cache(self) -> NamedSharding:
        """Of keys and values, `(layers, heads, ...)`. The order of the heads only
        `attention` knows: those of a device are together."""
        return NamedSharding(self.mesh, P(None, _ROWS))

    def between_layers(
        self, x: Float[Array, "batch length size"]
    ) -> Float[Array, "batch length size"]:
        return self._put(x, P("data", _SPLIT if self.by_tokens else None))

    def within_layer(
        self, x: Float[Array, "batch length size"]
    ) -> Float[Array, "batch length size"]:
        """Every device has all features of its tokens, which it multiplies by its part
        of a weight."""
        return self._put(x, P("data"))

    def attention(self, attend: Callable) -> Callable:
        """Each device runs `attend` on its sequences and heads."""

        def call(queries, keys, values, view, cache, layer, start):
            heads = P(("data", "group"), "heads")
            of_view = jax.tree.map(lambda _: P(), view)
            if view.mask.shape[0] > 1:
                of_view = dataclasses.replace(of_view, mask=heads)
            of_cache = jax.tree.map(lambda _: self.cache().spec, cache)

            def local(*args):
                y, cache = attend(*args)
                # Or XLA prefers another order for new rows, and so copies all of it.
                return y, jax.tree.map(_as_it_is, cache)

            # As products give them: or dense weights are gathered, for fewer sequences.
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
