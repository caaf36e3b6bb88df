"""The tensors of an array, and their places in it."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from .._jax import typed


Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, init=False)
class Concatenated:
    """Tensors that are concatenated along their first axis, for the argument `names` of
    [`eqquant.load_quantized`][].

    Many checkpoints store the weights of query, key and value apart. A model that
    multiplies them at once has one weight with the rows of all three.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import jax.numpy as jnp
        import tempfile

        path = f"{tempfile.mkdtemp()}/model.safetensors"
        eqquant.save(path, {"q": jnp.ones((64, 64)), "k": jnp.ones((32, 64))})

        attention = eqx.nn.Linear(64, 96, use_bias=False, key=jax.random.key(0))
        loaded = eqquant.load_quantized(
            path,
            attention,
            names=lambda path: eqquant.checkpoints.Concatenated("q", "k"),
        )
        assert loaded.weight.shape == (96, 64)
        ```

    **Arguments:**

    - `*names`: the names of the tensors, in the order of their rows.
    """

    names: tuple[str, ...]

    @typed
    def __init__(self, *names: str):
        if not names:
            raise ValueError("Concatenated: expected at least one name, got none.")
        object.__setattr__(self, "names", names)


@dataclasses.dataclass(frozen=True)
class Placed:
    """A tensor, and its place in an array: the indices of stacked axes, and its rows if
    tensors are concatenated."""

    name: str
    index: tuple[int, ...]
    rows: slice | None

    @property
    def place(self) -> tuple[int | slice, ...]:
        return self.index if self.rows is None else (*self.index, self.rows)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The tensors of an array.

    **Fields:**

    - `stacked`: the sizes of the axes along which tensors are stacked.
    - `rows`: the size of the axis along which they are concatenated, if they are.
    - `tensors`: all tensors.
    """

    stacked: Shape
    rows: int | None
    tensors: tuple[Placed, ...]

    @property
    def lead(self) -> Shape:
        """The sizes of the axes that places index."""
        return self.stacked if self.rows is None else (*self.stacked, self.rows)

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensor in self.tensors]

    @classmethod
    def of(cls, table: np.ndarray, shapes: Mapping[str, Shape]) -> "Layout":
        """Return the layout of a table: all names, or all [`Concatenated`][]."""
        tensors, rows = [], None
        for index, entry in np.ndenumerate(table):
            if isinstance(entry, str):
                tensors.append(Placed(entry, index, None))
                continue
            rows = 0
            for name in entry.names:
                first, rows = rows, rows + shapes[name][0]
                tensors.append(Placed(name, index, slice(first, rows)))
        return cls(table.shape, rows, tuple(tensors))


def names_of(entry: str | Concatenated) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry.names


def shape_of(entry: str | Concatenated, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape of an entry of a table. Raises a `ValueError` if tensors cannot
    be concatenated."""
    if isinstance(entry, str):
        return shapes[entry]
    found = [shapes[name] for name in entry.names]
    if () in found or len({shape[1:] for shape in found}) > 1:
        raise ValueError(f"tensors of the shapes {found} cannot be concatenated.")
    return (sum(shape[0] for shape in found), *found[0][1:])
