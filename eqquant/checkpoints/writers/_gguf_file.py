"""The container of GGUF files: key-value pairs and tensors."""

import dataclasses
import math
import pathlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..._jax import is_traced
from ...arrays import is_implicit, QuantizedArray
from ...trees import errors_at
from ..files import release, replacing, to_numpy
from ..foreign import GGUFFile, MAGIC, Type, TYPES
from ._ggml import to_ggml, type_of


_alignment = 32
_longest_name = 63  # llama.cpp appends a zero byte.
_most_axes = 4
_codes = {type.name: code for code, type in TYPES.items()}
# Keys that describe the types of the tensors of a source.
_own_keys = ("general.file_type", "comfy.gguf.orig_shape.")


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor to write. `make` returns its bytes."""

    name: str
    type: Type
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.block * self.type.nbytes

    @classmethod
    def copy(cls, source: GGUFFile, name: str) -> "GGUFTensor":
        stored = source.tensors[name]
        return cls(name, stored.type, stored.shape, lambda: source.read(stored))

    @classmethod
    def of(
        cls, name: str, described: Any, make: Callable[[], Any], caller: str
    ) -> "GGUFTensor":
        """Return the tensor for an array that is described here and made later."""
        where = f"{caller}: {name!r}"
        with errors_at(where):
            _check(name, described)
            type = type_of(described)

        def to_bytes() -> np.ndarray:
            with errors_at(where):
                array = make()
                if isinstance(array, QuantizedArray):
                    return to_ggml(type, array)
                return np.ascontiguousarray(to_numpy(array)).reshape(-1).view(np.uint8)

        return cls(name, type, tuple(described.shape), to_bytes)


def _check(name: str, array: Any) -> None:
    if any(map(is_traced, jax.tree.leaves(array))):
        raise TypeError("is traced: call this outside of `jit`.")
    if len(name.encode()) > _longest_name:
        raise ValueError(
            f"has more than {_longest_name} bytes, which llama.cpp refuses. Return a "
            "shorter name from `names`."
        )
    if array.ndim > _most_axes:
        raise ValueError(f"has {array.ndim} axes; GGUF has at most {_most_axes}.")
    if is_implicit(array) and not isinstance(array, QuantizedArray):
        raise TypeError(
            f"is a {type(array).__name__}. Merge adapters and remove wrappers first."
        )


def write_gguf_tensors(
    path: pathlib.Path,
    tensors: Sequence[GGUFTensor],
    source: GGUFFile | None,
    metadata: Mapping[str, Any],
    caller: str,
) -> None:
    """Write tensors one at a time, and the metadata of a source. Without tensors, the
    file has only the metadata and the tokenizer."""
    with errors_at(caller):
        pairs = _pairs(source, metadata, tensors)
    with replacing(path) as file:
        _write(file, pairs, tensors)


def _pairs(
    source: GGUFFile | None,
    metadata: Mapping[str, Any],
    tensors: Sequence[GGUFTensor],
) -> list[bytes]:
    """Return the bytes of key-value pairs."""
    pairs: dict[str, bytes] = {}
    is_same = False
    if source is not None:
        pairs = {key: source.raw_pair(key) for key in source.metadata}
        types = {name: stored.type.name for name, stored in source.tensors.items()}
        is_same = types == {tensor.name: tensor.type.name for tensor in tensors}
    if not is_same:
        pairs = {k: v for k, v in pairs.items() if not k.startswith(_own_keys)}
        if any(tensor.type.dtype is None for tensor in tensors):
            # The specification of GGUF requires it for quantized tensors.
            metadata = {"general.quantization_version": 2, **metadata}
    pairs.pop("general.alignment", None)
    pairs |= {key: _text(key) + _value(value, key) for key, value in metadata.items()}
    return list(pairs.values())


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


# The numbers of types, and the formats of `struct`.
_uint32, _int32, _float32, _bool, _string, _array = 4, 5, 6, 7, 8, 9
_struct = {_uint32: "<I", _int32: "<i", _float32: "<f", _bool: "<?"}


def _kind(values: list) -> int:
    """Return the type of all values."""
    if all(isinstance(value, str) for value in values):
        return _string
    if all(isinstance(value, bool) for value in values):
        return _bool
    numbers = [v for v in values if not isinstance(v, bool | str)]
    if len(numbers) == len(values) and all(isinstance(v, int) for v in values):
        return _int32 if min(values) < 0 else _uint32
    return _float32 if len(numbers) == len(values) else _array


def _value(value: Any, key: str) -> bytes:
    """Return the type and the bytes of a value."""
    values = value if isinstance(value, list) else [value]
    kind = _kind(values)
    try:
        if kind == _array:
            raise TypeError
        raw = b"".join(
            _text(v) if kind == _string else struct.pack(_struct[kind], v)
            for v in values
        )
    except (TypeError, struct.error, OverflowError):
        raise ValueError(
            f"metadata: {key!r} must be a string, a bool, an integer of 32 bits, a "
            f"float, or a list of values of one of these types, got {value!r:.80}."
        ) from None
    if isinstance(value, list):
        return struct.pack("<IIQ", _array, kind, len(values)) + raw
    return struct.pack("<I", kind) + raw


def _write(file: Any, pairs: list[bytes], tensors: Sequence[GGUFTensor]) -> None:
    header = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(pairs)), *pairs]
    start = 0
    for tensor in tensors:
        shape = tensor.shape[::-1]  # The first axis in the file is contiguous.
        axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        kind = struct.pack("<IQ", _codes[tensor.type.name], start)
        header.append(_text(tensor.name) + axes + kind)
        start += -(-tensor.nbytes // _alignment) * _alignment
    file.write(b"".join(header))
    for tensor in tensors:
        file.write(bytes(-file.tell() % _alignment))
        raw = tensor.make()
        assert raw.nbytes == tensor.nbytes, tensor
        file.write(raw.data)
        release(raw)
    file.write(bytes(-file.tell() % _alignment))
