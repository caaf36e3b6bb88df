"""Convert a checkpoint to the layout of another library, without a model."""

import dataclasses
import hashlib
import os
import pathlib
import sys
from collections.abc import Container, Iterator
from typing import Any

import jax
import numpy as np

from .._jax import typed
from ..arrays import dequantize, is_implicit, quantize, QuantizedArray
from ..formats import as_format, Format
from ..trees import as_text, errors_at, with_progress
from ._convert_gguf import GGUFLibrary, write_converted
from ._describe import describe_checkpoint
from ._open import ForeignContents, open_contents
from .files import check_shard_size, Path, release, ShardWriter, to_jax
from .foreign import NotExact
from .leaves import Contents, MAX_SHARD_SIZE
from .writers import (
    BitsAndBytes,
    check_target,
    CompressedTensors,
    Floats,
    GPTQ,
    Library,
    METADATA,
    MLX,
    NotHeld,
    Packed,
    write_arrays,
    Written,
)


_caller = "convert_checkpoint"
LIBRARIES: dict[str, type[Library]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": GPTQ,
    "mlx": MLX,
    "bitsandbytes": BitsAndBytes,
    "safetensors": Floats,
}
TARGETS = (*LIBRARIES, "gguf")


@dataclasses.dataclass(frozen=True)
class Converted:
    """A tensor that [`eqquant.checkpoints.convert_checkpoint`][] wrote.

    !!! Example

        ```python
        import tempfile

        import eqquant
        import jax.numpy as jnp

        folder = tempfile.mkdtemp()
        eqquant.save(f"{folder}/a", {"weight": jnp.ones((8, 64))})
        report = eqquant.checkpoints.convert_checkpoint(
            f"{folder}/a", f"{folder}/b", "safetensors"
        )
        assert report["weight"].is_exact
        ```

    **Fields:**

    - `before`, `after`: its format or dtype in the source and in the result.
    - `is_exact`: whether its values did not change. `False` if it was requantized.
    """

    before: str
    after: str
    is_exact: bool


class Conversion(dict[str, Converted]):
    """The tensors of a conversion by name. `print` shows them as a table.

    !!! Example

        ```python
        import tempfile

        import eqquant
        import jax.numpy as jnp

        folder = tempfile.mkdtemp()
        eqquant.save(f"{folder}/a", {"weight": jnp.ones((8, 64))})
        report = eqquant.checkpoints.convert_checkpoint(
            f"{folder}/a", f"{folder}/b", "safetensors"
        )
        assert "1 of 1 exact" in str(report)
        ```
    """

    def __str__(self) -> str:
        rows = [("path", "from", "to", "values")]
        for name, found in self.items():
            values = "exact" if found.is_exact else "requantized"
            rows.append((name, found.before, found.after, values))
        exact = sum(found.is_exact for found in self.values())
        rows.append(("total", "", "", f"{exact} of {len(self)} exact"))
        return "\n".join(as_text(rows))


@typed
def convert_checkpoint(
    src: Path,
    dst: Path,
    to: str,
    *,
    requantize: Format | str | None = None,
    max_shard_size: int | None = MAX_SHARD_SIZE,
    resume: bool = False,
    progress: bool | None = None,
) -> Conversion:
    """Convert a quantized checkpoint to the layout of another library, without a model.

    Tensors are read, converted and written one at a time. Codes and scales are kept.
    Float tensors are copied: quantize them first with
    [`eqquant.checkpoints.quantize_checkpoint`][].

    !!! Example

        ```python
        import eqquant
        import jax
        import tempfile

        folder = tempfile.mkdtemp()
        weight = jax.random.normal(jax.random.key(0), (64, 256))
        model = {"head": {"weight": weight}}
        format = eqquant.Int4(block_size=64, scale_dtype="bfloat16")
        model = eqquant.quantize_tree(model, format, rules={"*": format})
        eqquant.save(f"{folder}/ours", model)
        convert = eqquant.checkpoints.convert_checkpoint
        report = convert(f"{folder}/ours", f"{folder}/mlx", "mlx")
        assert report["head.weight"].is_exact
        print(report)
        ```

    **Arguments:**

    - `src`: a checkpoint of eqquant or another library, as `path` in
        [`eqquant.load_quantized`][].
    - `dst`: a folder, as in [`eqquant.checkpoints.write_compressed_tensors`][]. The
        other files of the folder `src` are copied. For GGUF, a file.
    - `to`: `"compressed-tensors"`, `"gptq"`, `"mlx"`, `"gguf"`, `"bitsandbytes"`, or
        `"safetensors"` for floats. Names are kept; llama.cpp has other names than
        Hugging Face.
    - `requantize`: the format for weights that the library cannot store exactly. They
        are decoded and quantized again. `None` raises an error instead.
    - `max_shard_size`: as in [`eqquant.save`][]. A GGUF file is not split.
    - `resume`: keep finished shards if the conversion is interrupted, in a hidden
        folder in `dst`, or beside a GGUF file. The next call with equal arguments and
        an unchanged `src` continues after them. Choose a small `max_shard_size`, such
        as `10**9`.
    - `progress`: as in [`eqquant.quantize_tree`][].

    **Returns:**

    A dictionary from names to [`eqquant.checkpoints.Converted`][], which prints as a
    table.

    **Raises:**

    `ValueError` if a weight cannot be stored exactly and `requantize` is `None`, with
    its name and the reason. `dst` then keeps its contents.
    """
    if to not in TARGETS:
        raise ValueError(
            f"{_caller}: to must be one of {', '.join(TARGETS)}, got {to!r}."
        )
    if to == "gguf" and pathlib.Path(dst).is_dir():
        raise ValueError(
            f"{_caller}: GGUF is one file, but {os.fspath(dst)} is a folder. Pass a "
            "path that ends in .gguf."
        )
    format = None if requantize is None else as_format(requantize)
    source, target = (pathlib.Path(os.fspath(path)) for path in (src, dst))
    description = describe_checkpoint(source)
    if source.resolve() == target.resolve():
        raise ValueError(
            f"{_caller}: src and dst must be different, got {source} for both."
        )
    check_shard_size(max_shard_size, _caller)
    library = _Requantizing(LIBRARIES.get(to, GGUFLibrary)(), format)
    key = _key(source, to, format, max_shard_size) if resume else None
    with open_contents(source, (), _caller, decode=False) as contents:

        def arrays(done: Container[str]) -> Iterator[tuple[str, Any]]:
            names = [name for name in contents.described if name not in done]
            elements = sum(description.tensors[name].size for name in names)
            what = {"caller": _caller, "what": ("converting", "tensor")}
            shown = with_progress(names, elements, progress, **what)
            return _read(shown, contents, library)

        if to == "gguf":
            written = write_converted(
                target,
                source,
                contents.described,
                arrays,
                library,
                max_shard_size,
                key,
                _caller,
            )
        else:
            others = source if source.is_dir() else None
            check_target(target, others, max_shard_size, _caller)
            with ShardWriter(target, max_shard_size, METADATA, key) as writer:
                rest = arrays(frozenset(writer.notes))
                written = write_arrays(library, writer, rest, others, _caller)
    report = Conversion()
    for name, tensor in description.tensors.items():
        after = written.get(name, Written(tensor.type, True))
        report[name] = Converted(tensor.type, after.layout, after.is_exact)
    return report


def _key(
    source: pathlib.Path, to: str, format: Format | None, max_shard_size: int | None
) -> str:
    """Return a hash of the arguments and the files of a conversion."""
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    seen = [
        (x.name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        for x in files
        for s in [x.stat()]
    ]
    # The package may run from a folder, where `importlib.metadata` does not find it.
    version = getattr(sys.modules["eqquant"], "__version__", "")
    parts = version, str(source.resolve()), seen, to, format, max_shard_size
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class _Requantizing(Library):
    """A library, and a format for weights that it cannot store exactly."""

    name = "any library"

    def __init__(self, library: Library, format: Format | None):
        self._library, self.format = library, format
        self._changed: set[str] = set()

    def pack(self, name: str, q: QuantizedArray) -> Packed:
        return self._library.pack(name, q)

    def config(self, packed, plain):
        return self._library.config(packed, plain)

    def packed(self, name, q):
        try:
            packed = self._library.packed(name, q)
        except NotHeld as error:
            packed = self._packed_again(name, q.dequantize(), error)
        return dataclasses.replace(packed, is_exact=name not in self._changed)

    def _packed_again(self, name: str, array: Any, reason: Exception) -> Packed:
        again = self.requantized(name, array, reason)
        try:
            return self._library.packed(name, again)
        except NotHeld as error:
            raise NotHeld(
                f"was requantized, and then {error} Pass another format as requantize."
            ) from error

    def requantized(self, name: str, array: Any, reason: Exception) -> QuantizedArray:
        if self.format is None:
            raise NotHeld(
                f"{reason} Or pass requantize (--requantize FORMAT), which rounds it "
                "again."
            )
        self._changed.add(name)
        # Other libraries have one float32 factor of NVFP4 per tensor, not per row.
        axis = tuple(range(array.ndim)) if self.format.name == "nvfp4" else -1
        return quantize(array, self.format, axis=axis)


def _read(
    names: Any, contents: Contents | ForeignContents, library: _Requantizing
) -> Iterator[tuple[str, Any]]:
    for name in names:
        stored: list[Any] = []
        with errors_at(f"{_caller}: {name!r}"):
            found = contents.described[name]
            try:
                leaf = contents.read(name)
                stored = jax.tree.leaves(leaf)
                leaf = jax.tree.map(to_jax, leaf) if is_implicit(leaf) else leaf
            except NotExact as error:
                floats = np.empty(found.shape, found.dtype)
                floats[...] = contents.read_array(name, found.dtype)
                leaf = library.requantized(name, to_jax(floats), error)
            if is_implicit(leaf) and not isinstance(leaf, QuantizedArray):
                problem = NotHeld(f"is a {type(leaf).__name__}.")
                leaf = library.requantized(name, dequantize(leaf), problem)
        if hasattr(leaf, "dtype"):
            yield name, leaf
        # The written pages of the source would count as memory of this process.
        for part in stored:
            release(part)
