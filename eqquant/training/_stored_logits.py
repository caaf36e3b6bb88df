"""Logits of a teacher on disk."""

import hashlib
import json
import pathlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._kl_divergence import TopLogits


_version = 1
_header = "header.json"
_list = "batches.txt"
_names = "indices.bin", "log_probabilities.bin"


class StoredLogits:
    """Logits of a teacher in a folder, for [`eqquant.training.distill`][].
    [`eqquant.training.store_logits`][] makes the folder.

    Two files contain the most probable tokens (uint16 or uint32) and their log
    probabilities (float32), and are read with `np.memmap`. Batches are found by a hash
    of their arrays, so their order does not matter.

    !!! Example

        ```python
        import eqquant
        import equinox as eqx
        import jax
        import tempfile

        teacher = eqx.nn.MLP(64, 500, 64, 1, key=jax.random.key(0))
        batch = jax.random.normal(jax.random.key(1), (32, 64))
        folder = tempfile.mkdtemp()
        forward = lambda model, batch: jax.vmap(model)(batch)
        eqquant.training.store_logits(folder, forward, teacher, [batch], k=10)

        logits = eqquant.training.StoredLogits(folder)
        assert logits.positions == 32 and logits.vocabulary == 500
        assert logits.of(batch).indices.shape == (32, 10)
        ```

    **Arguments:** `folder`: the path of the folder.

    **Fields:**

    - `vocabulary`, `k`, `temperature`: the number of tokens in the vocabulary, the
        number of stored tokens per position, and the divisor of the logits.
    - `positions`: the number of stored positions.

    **Raises:** `ValueError` if the folder has no logits, or if its files do not match.
    """

    def __init__(self, folder: Any):
        self.folder = pathlib.Path(folder)
        try:
            header = json.loads((self.folder / _header).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                "StoredLogits: folder must be made by "
                f"`eqquant.training.store_logits`, got {str(folder)!r}: {error}"
            ) from None
        self.header = header
        if header.get("version") != _version:
            raise ValueError(
                f"StoredLogits: folder must have version {_version}, got "
                f"{header.get('version')} in {str(folder)!r}. Store the logits again."
            )
        self.vocabulary, self.k = header["vocabulary"], header["k"]
        self.temperature = header["temperature"]
        self._starts: dict[str, tuple[int, int]] = {}
        self._end = 0
        for line in (self.folder / _list).read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # Otherwise, the program was stopped here.
                digest, start, count = line.split()
                self._starts[digest] = int(start), int(count)
                self._end += len(line)
        self.positions = sum(count for _, count in self._starts.values())
        for name, dtype, width in self._layout:
            size = (self.folder / name).stat().st_size
            needed = self.positions * width * dtype.itemsize
            if size < needed:
                raise ValueError(
                    f"StoredLogits: {name} in {str(folder)!r} must have {needed} bytes "
                    f"for {self.positions} positions with k={self.k}, got {size}. The "
                    "folder is damaged: delete it, and store the logits again."
                )

    @property
    def _layout(self) -> list[tuple[str, np.dtype, int]]:
        """The name, the dtype and the row length of each file."""
        index = "uint16" if self.vocabulary <= 2**16 else "uint32"
        return [
            (_names[0], np.dtype(index), self.k),
            (_names[1], np.dtype("float32"), self.k + 1),
        ]

    def __contains__(self, batch: Any) -> bool:
        return digest_of(batch) in self._starts

    def of(self, batch: Any) -> TopLogits:
        """Return the logits for a batch. Raises `ValueError` if they are not stored."""
        found = self._starts.get(digest_of(batch))
        if found is None:
            raise ValueError(
                f"batches must be batches whose logits are in {str(self.folder)!r}, "
                f"which has {len(self._starts)}, but one is not. Call "
                "`eqquant.training.store_logits` with the same batches."
            )
        start, count = found
        parts = []
        for name, dtype, width in self._layout:
            shape, offset = (count, width), start * width * dtype.itemsize
            parts.append(np.memmap(self.folder / name, dtype, "r", offset, shape))
        indices, log_probabilities = jnp.asarray(parts[0], jnp.int32), parts[1]
        sizes = self.vocabulary, self.temperature
        return TopLogits(indices, jnp.array(log_probabilities), *sizes)

    @classmethod
    def opened(cls, folder: pathlib.Path, caller: str, **settings: Any):
        """Open a folder, or make it. An existing folder must have these settings."""
        settings["version"] = _version
        if not (folder / _header).exists():
            folder.mkdir(parents=True, exist_ok=True)
            for name in (_list, *_names):
                (folder / name).write_bytes(b"")
            (folder / _header).write_text(json.dumps(settings, indent=1))
        stored = cls(folder)
        for name, value in settings.items():
            if (old := stored.header.get(name)) != value:
                raise ValueError(
                    f"{caller}: folder must have logits with {name}={value!r}, but "
                    f"{str(folder)!r} has {name}={old!r}. Pass another folder."
                )
        return stored

    def append(self, batch: Any, top: TopLogits) -> None:
        start, count = self.positions, len(top.indices)
        arrays = top.indices, top.log_probabilities
        for (name, dtype, width), array in zip(self._layout, arrays, strict=True):
            data = np.asarray(array).astype(dtype).tobytes()
            _write_at(self.folder / name, start * width * dtype.itemsize, data)
        # Last, so that the list never names logits that are not in the files.
        digest = digest_of(batch)
        line = f"{digest} {start} {count}\n"
        _write_at(self.folder / _list, self._end, line.encode())
        self._starts[digest] = start, count
        self.positions, self._end = start + count, self._end + len(line)


def _write_at(path: pathlib.Path, offset: int, data: bytes) -> None:
    """Write data to a file, in place of the end that an interrupted program wrote."""
    with path.open("r+b") as file:
        file.truncate(offset)
        file.seek(offset)
        file.write(data)


def digest_of(tree: Any) -> str:
    """Return a hash of the arrays in a pytree."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array_like)):
        array = np.asarray(leaf)
        found.update(f"{array.dtype} {array.shape} ".encode())
        found.update(array.tobytes())
    return found.hexdigest()
