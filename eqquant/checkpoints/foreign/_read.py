"""Checkpoints that other libraries wrote: which kind one is, and what it holds."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator

from jaxtyping import Array

from ..._jax import typed
from ...arrays import QuantizedArray
from ..files import Path, Source, Tensor
from ._awq import awq_entries
from ._bitnet import bitnet_entries
from ._bitsandbytes import bitsandbytes_entries
from ._compressed_tensors import compressed_tensors_entries
from ._config import PackingConfig
from ._entry import Entry
from ._gguf import GGUFFile, is_gguf
from ._gguf_entries import gguf_entries
from ._gptq import gptq_entries
from ._parts import prefixes
from ._scaled_bytes import scaled_byte_entries


@typed
def read_checkpoint(
    path: Path, *, decode: bool = False
) -> dict[str, Array | QuantizedArray]:
    """Read a checkpoint that another library wrote, without quantizing again.

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

    The kind is recognised by what the file holds:

    - GGUF: `Q8_0`, `Q5_0`, `Q6_K` and others with integers, as [`eqquant.Int8`][];
        `Q4_0`, `Q4_1` and `Q3_K` as [`eqquant.Int4`][]; `TQ1_0` and `TQ2_0` as
        [`eqquant.Ternary`][].
    - bitsandbytes in safetensors: NF4 as [`eqquant.NF4`][], LLM.int8() as
        [`eqquant.Int8`][].
    - BitNet in safetensors, as Hugging Face packs it: [`eqquant.Ternary`][].
    - GPTQ, AWQ and compressed-tensors in safetensors, of 4, 3 or 2 bits:
        [`eqquant.Int4`][], [`eqquant.Int3`][] and [`eqquant.Int2`][], with offsets if
        there are zero points; and [`eqquant.Int8`][].
    - FP8 and int8 with scales, as vLLM and Hugging Face have them: [`eqquant.FP8`][]
        and [`eqquant.Int8`][].
    - Any other safetensors: plain arrays.

    Codes and values are those of the file, bit for bit (values of LLM.int8() up to the
    rounding of their scales). A tensor that no format of eqquant holds is an error that
    says why.

    **Arguments:**

    - `path`: a GGUF or safetensors file, the index of several
        (`.safetensors.index.json`), or a folder that holds either of the latter.
    - `decode`: decode tensors that no format holds to floating point, for example
        `Q4_K`, or FP4 of bitsandbytes. You can then quantize them again.

    **Returns:**

    A flat dictionary by the names of the file, of plain arrays and
    [`eqquant.QuantizedArray`][]s.

    **Raises:**

    `ValueError` if the file is damaged, or of a kind that is not known; and if it has
    a tensor that no format holds, unless `decode` is set and can decode it.
    `FileNotFoundError` if there is no such file.
    """
    with open_entries(path) as entries:
        return {name: entry.read(decode) for name, entry in entries.items()}


@contextlib.contextmanager
def open_entries(path: Path) -> Iterator[dict[str, Entry]]:
    """What a checkpoint holds, which can be read while it is open."""
    if is_gguf(pathlib.Path(path)):
        with GGUFFile(path) as file:
            yield gguf_entries(file)
    else:
        with Source(path) as source:
            if source.is_ours:
                raise ValueError(
                    f"{source.path}: eqquant wrote this. Read it with eqquant.load."
                )
            yield safetensors_entries(source)


def safetensors_entries(source: Source) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    used: set[str] = set()
    for find in _finders:
        for name, entry in find(source).items():
            if twice := used.intersection(entry.parts):
                raise ValueError(
                    f"{source.path}: {min(twice)!r} belongs to two quantized weights."
                )
            if name in entries:
                raise ValueError(f"{source.path}: {name!r} is there twice.")
            entries[name] = entry
            used.update(entry.parts)
    plain = [t for name, t in source.tensors.items() if name not in used]
    _refuse_unknown(source, plain)
    if twice := entries.keys() & {stored.name for stored in plain}:
        raise ValueError(f"{source.path}: {min(twice)!r} is there twice.")
    entries |= {stored.name: _plain(source, stored) for stored in plain}
    # In the order of the file.
    order = {name: i for i, name in enumerate(source.tensors)}
    first = lambda item: min(order[part] for part in item[1].parts)
    return dict(sorted(entries.items(), key=first))


def _entries_in_words(source: Source) -> dict[str, Entry]:
    """Of GPTQ or AWQ, which name their tensors alike."""
    if next(prefixes(source, "qweight"), None) is None:
        return {}
    config = PackingConfig(source, "'qweight', as GPTQ and AWQ do", "how it is packed")
    find = {"gptq": gptq_entries, "awq": awq_entries}.get(config.method)
    return {} if find is None else find(source, config)


_finders: tuple[Callable[[Source], dict[str, Entry]], ...] = (
    bitsandbytes_entries,
    bitnet_entries,
    _entries_in_words,
    compressed_tensors_entries,
    scaled_byte_entries,
)


def check_plain(source: Source, caller: str) -> None:
    """That another library has not quantized it."""
    entries = {} if source.is_ours else safetensors_entries(source)
    for entry in entries.values():
        if entry.quantized is not None:
            raise ValueError(
                f"{caller}: {entry.where} is quantized already, by another library. "
                "Read it with eqquant.checkpoints.read_checkpoint."
            )


def _plain(source: Source, stored: Tensor) -> Entry:
    where = f"{source.path}: {stored.name!r}"
    read = lambda: source.read(stored.name)
    return Entry(where, stored.shape, stored.dtype, read, parts=(stored.name,))


def _refuse_unknown(source: Source, plain: list[Tensor]) -> None:
    """Packed weights that are not known, which would come as wrong numbers."""
    for stored in plain:
        name = stored.name
        prefix, _, last = name.rpartition(".")
        beside = lambda part, prefix=prefix: source.tensors.get(
            f"{prefix}.{part}" if prefix else part
        )
        kind = None
        if last == "qweight":
            kind = "a relative of GPTQ"
        elif last == "weight" and stored.dtype.name == "uint32" and beside("scales"):
            kind = "MLX, with offsets" if beside("biases") else "MLX"
        if kind is not None:
            raise ValueError(
                f"{source.path}: {name!r} is packed by {kind}. eqquant has no format "
                "that holds it, and does not decode it. Convert the checkpoint with "
                "the library that wrote it."
            )
