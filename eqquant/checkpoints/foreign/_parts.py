"""Look up and check the tensors that make up a weight."""

from collections.abc import Iterator, Sequence

import numpy as np

from ..files import Source, Tensor


class Parts:
    """The tensors of one prefix, such as `model.layers.0.mlp.up_proj.`.

    **Fields:**

    - `weight`: the name of the weight.
    - `where`: the file and the name of the weight, for errors.
    - `names`: the names of the tensors that were looked up.
    """

    weight: str
    where: str
    names: list[str]

    def __init__(self, source: Source, prefix: str, library: str):
        self._source, self._prefix = source, prefix
        self.weight = f"{prefix}weight"
        self.where = f"{source.path}: {self.weight!r} of {library}"
        self.names = []

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._source.tensors

    def look_up(
        self, name: str, dtypes: Sequence[str], *shapes: tuple[int | None, ...]
    ) -> Tensor:
        """Return a tensor, which must have one of the dtypes and one of the shapes.
        `None` in a shape stands for any size."""
        if name not in self:
            raise ValueError(f"{self.where} needs {name!r}, which is missing.")
        found = self._source.tensors[self._prefix + name]
        fits = any(
            len(shape) == len(found.shape)
            and all(n in (None, m) for n, m in zip(shape, found.shape, strict=True))
            for shape in shapes
        )
        if found.dtype.name not in dtypes or not fits:
            shown = " or ".join(str(s).replace("None", "any") for s in shapes)
            raise ValueError(
                f"{self.where}: {name!r} must be {' or '.join(dtypes)} of the shape "
                f"{shown}, got {found.dtype.name} of {found.shape}."
            )
        self.names.append(found.name)
        return found

    def read(self, name: str) -> np.ndarray:
        return self._source.read(self._prefix + name)


def prefixes(source: Source, name: str) -> Iterator[str]:
    """Yield the prefixes of all tensors whose names end in `name`."""
    for found in source.tensors:
        prefix = found.removesuffix(name)
        if prefix != found and (not prefix or prefix.endswith(".")):
            yield prefix
