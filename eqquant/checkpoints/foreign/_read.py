"""Find out which library wrote a checkpoint, and read it."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator

from jaxtyping import Array

from ..._jax import typed
from ...arrays import QuantizedArray
from ..files import Path, Source, Tensor
from ._bitnet import bitnet_entries
from ._bitsandbytes import bitsandbytes_entries
from ._config import PackingConfig
from ._entry import Entry
from ._fp4 import fp4_entries
from ._gguf import GGUFFile, is_gguf
from ._gguf_entries import gguf_entries
from ._mlx import mlx_entries
from ._packed import awq_entries, compressed_tensors_entries, gptq_entries
from ._parts import find_parts
from ._scaled_bytes import scaled_byte_entries


@typed
def read_checkpoint(
    path: Path, *, decode: bool = False
) -> dict[str, Array | QuantizedArray]:
    """Read a checkpoint that another library wrote, without quantizing it again.

    !!! Example

        ```python
        import eqquant
        import numpy as np
        import tempfile
        from safetensors.numpy import save_file

        path = f"{tempfile.mkdtemp()}/model.safetensors"
        save_file({"weight": np.ones((4, 64), np.float32)}, path)
        assert eqquant.checkpoints.read_checkpoint(path)["weight"].shape == (4, 64)
        ```

    The contents of the file determine its kind:

    - GGUF: integer types such as `Q4_0`, `Q4_1`, `Q4_K` and `Q6_K` become integers of
        the same bits, such as [`eqquant.Int4`][] and [`eqquant.formats.Int6`][].
        `IQ4_NL` and `IQ4_XS` become [`eqquant.formats.Codebook`][]. `TQ2_0` becomes
        [`eqquant.Ternary`][], and `TQ1_0` [`eqquant.formats.DenseTernary`][].
    - bitsandbytes in safetensors: NF4 becomes [`eqquant.NF4`][], and LLM.int8() becomes
        [`eqquant.Int8`][].
    - BitNet in safetensors, as Hugging Face packs it: [`eqquant.Ternary`][].
    - GPTQ, AWQ and compressed-tensors in safetensors: 4, 3 and 2 bits become
        [`eqquant.Int4`][], [`eqquant.Int3`][] and [`eqquant.Int2`][], with offsets if
        the file has zero points. 8 bits become [`eqquant.Int8`][].
    - FP8 and int8 with scales, as vLLM and Hugging Face store them: [`eqquant.FP8`][]
        and [`eqquant.Int8`][].
    - Other safetensors: plain arrays.

    Codes and dequantized values equal those of the writing library bit for bit, except
    that the scales of LLM.int8() are rounded. If no format of eqquant stores a tensor
    exactly, the function raises an error with the reason.

    **Arguments:**

    - `path`: a GGUF or safetensors file, the index of several safetensors files
        (`.safetensors.index.json`), or a folder with safetensors.
    - `decode`: decode a tensor to floating point if no format stores it exactly, for
        example bitsandbytes FP4. You can then quantize it again.

    **Returns:**

    A flat dictionary of plain arrays and [`eqquant.QuantizedArray`][]s, with the names
    of the file.

    **Raises:**

    `ValueError` if the file is damaged, if its kind is unknown, or if no format stores
    a tensor exactly and `decode` is off or cannot decode it. `FileNotFoundError` if the
    file does not exist.
    """
    with open_entries(path) as entries:
        return {name: entry.read(decode) for name, entry in entries.items()}


@contextlib.contextmanager
def open_entries(path: Path) -> Iterator[dict[str, Entry]]:
    """Open a checkpoint and yield its tensors by name. You can read them until the
    block ends."""
    if is_gguf(pathlib.Path(path)):
        with GGUFFile(path, vocabulary=False) as file:
            yield gguf_entries(file)
    else:
        with Source(path) as source:
            if source.is_ours:
                raise ValueError(
                    f"{source.path}: eqquant wrote this file. Read it with "
                    "eqquant.load."
                )
            yield safetensors_entries(source)


def safetensors_entries(source: Source) -> dict[str, Entry]:
    """Describe all tensors of safetensors files, in the order of the files."""
    entries: dict[str, Entry] = {}
    used: set[str] = set()
    for find in _finders:
        for name, entry in find(source).items():
            if shared := used.intersection(entry.parts):
                raise ValueError(
                    f"{source.path}: {min(shared)!r} belongs to two quantized weights."
                )
            if name in entries:
                raise ValueError(f"{source.path}: {name!r} has two sets of tensors.")
            entries[name] = entry
            used.update(entry.parts)
    plain = [t for name, t in source.tensors.items() if name not in used]
    _reject_unknown(source, plain)
    if shared := entries.keys() & {stored.name for stored in plain}:
        raise ValueError(f"{source.path}: {min(shared)!r} is both plain and quantized.")
    entries |= {stored.name: _plain(source, stored) for stored in plain}
    order = {name: i for i, name in enumerate(source.tensors)}
    first = lambda item: min(order[part] for part in item[1].parts)
    return dict(sorted(entries.items(), key=first))


def _int32_entries(source: Source) -> dict[str, Entry]:
    """Describe GPTQ or AWQ weights. Both libraries use the same tensor names."""
    if next(find_parts(source, "qweight", ""), None) is None:
        return {}
    config = PackingConfig(source, "'qweight' of GPTQ or AWQ", "how it is packed")
    find = {"gptq": gptq_entries, "awq": awq_entries}.get(config.method)
    return {} if find is None else find(source, config)


_finders: tuple[Callable[[Source], dict[str, Entry]], ...] = (
    bitsandbytes_entries,
    bitnet_entries,
    _int32_entries,
    compressed_tensors_entries,
    fp4_entries,
    mlx_entries,
    scaled_byte_entries,
)


def _plain(source: Source, stored: Tensor) -> Entry:
    where = f"{source.path}: {stored.name!r}"
    read = lambda: source.view(stored.name)
    return Entry(where, stored.shape, stored.dtype, read, parts=(stored.name,))


def _reject_unknown(source: Source, plain: list[Tensor]) -> None:
    """Raise a `ValueError` for packed weights of unknown layout, which would silently
    load as wrong numbers."""
    for stored in plain:
        name = stored.name
        prefix, _, last = name.rpartition(".")
        beside = lambda part, prefix=prefix: source.tensors.get(
            f"{prefix}.{part}" if prefix else part
        )
        kind = None
        if last == "qweight":
            kind = "a variant of GPTQ"
        elif last == "weight" and stored.dtype.name == "uint32" and beside("scales"):
            kind = "a variant of MLX"
        if kind is not None:
            raise ValueError(
                f"{source.path}: {name!r} is packed by {kind}, which eqquant cannot "
                "read. Convert the checkpoint with the library that wrote it."
            )
