"""Write GGUF files, which llama.cpp reads."""

import contextlib
import dataclasses
import os
import pathlib
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ..._jax import is_traced, typed
from ...arrays import is_implicit, QuantizedArray
from ...trees import errors_at
from ..files import Path, replacing, to_numpy
from ..foreign import GGUFFile, MAGIC, Type, TYPES
from ._ggml import to_ggml, type_of
from ._write import named_arrays, Names


_alignment = 32
_longest_name = 63  # llama.cpp appends a zero byte.
_most_axes = 4
_codes = {type.name: code for code, type in TYPES.items()}
# Keys of a source that describe its own layout.
_own_keys = ("general.alignment", "general.file_type", "comfy.gguf.orig_shape.")


@typed
def write_gguf(
    path: Path,
    model: PyTree,
    *,
    names: Names | None = None,
    source: Path | None = None,
    metadata: Mapping[str, bool | int | float | str | list] | None = None,
) -> None:
    """Write a model to a GGUF file. Codes and scales are unchanged, bit for bit.

    !!! Example

        ```python
        import eqquant
        import jax
        import tempfile

        weight = jax.random.normal(jax.random.key(0), (16, 256))
        q = eqquant.quantize(weight, eqquant.Int4(scale_dtype="float16"))
        path = f"{tempfile.mkdtemp()}/model.gguf"
        eqquant.checkpoints.write_gguf(path, {"output.weight": q})  # Q4_0
        read = eqquant.checkpoints.read_checkpoint(path)["output.weight"]
        assert (read.codes == q.codes).all() and (read.scales == q.scales).all()
        ```

    | format | type |
    |---|---|
    | `Int4(32, "float16")` | `Q4_0` |
    | `Int4(32, "float16", affine=True)` | `Q4_1` |
    | `formats.Int5(32, "float16")`, the same with `affine=True` | `Q5_0`, `Q5_1` |
    | `Int8(32, "float16")` | `Q8_0` |
    | `Int2(16, affine=True, unsigned=True, double_quantization="k")` | `Q2_K` |
    | `Int3(16, double_quantization="k")` | `Q3_K` |
    | `Int4(affine=True, unsigned=True, double_quantization="k")` | `Q4_K` |
    | `formats.Int5(affine=True, unsigned=True, double_quantization="k")` | `Q5_K` |
    | `formats.Int6(16, double_quantization="k")` | `Q6_K` |
    | `formats.Codebook` with the levels of `IQ4_NL` | `IQ4_NL`, `IQ4_XS` |
    | `Ternary(256, "float16")`, `MXFP4()` | `TQ2_0`, `MXFP4` |
    | float32, float16, bfloat16 | `F32`, `F16`, `BF16` |

    Longer blocks are written as several blocks with the same scale, and scales of other
    dtypes are accepted if float16 represents them exactly.

    **Arguments:**

    - `path`: the file. An existing file is replaced when the new one is complete.
    - `model`: a pytree, for example a dictionary from
        [`eqquant.checkpoints.read_checkpoint`][].
    - `names`: a function from the path of an array, such as `layers[0].weight`, to its
        name in the file; to a list of names, for a stack; or to `None`, to leave the
        array out. By default, a name is the path.
    - `source`: a GGUF file whose metadata and tokenizer are copied. The arrays must
        have the names and the shapes of its tensors. Tensors of floats and integers
        that the model lacks are copied.
    - `metadata`: key-value pairs that replace or extend the pairs of `source`. Integers
        become uint32, or int32 if they are negative, and floats become float32. A list
        has elements of one type.

    **Raises:**

    `ValueError` that names the array and what would be lost, if no type stores an array
    exactly, and if names or shapes differ from `source`. The file does not change then.
    """
    target, caller = pathlib.Path(os.fspath(path)), "write_gguf"
    arrays = dict(named_arrays(model, names, caller))
    with contextlib.ExitStack() as stack:
        original = None if source is None else stack.enter_context(GGUFFile(source))
        tensors = [_tensor(name, array, caller) for name, array in arrays.items()]
        if original is not None:
            tensors = _like(original, {t.name: t for t in tensors}, caller)
        with errors_at(caller):
            pairs = _pairs(original, metadata or {}, tensors)
        with replacing(target) as file:
            _write(file, pairs, tensors)


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor to write. `make` returns its bytes."""

    name: str
    type: Type
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) // self.type.block * self.type.nbytes


def _tensor(name: str, array: Any, caller: str) -> _Tensor:
    with errors_at(f"{caller}: {name!r}"):
        if any(map(is_traced, jax.tree.leaves(array))):
            raise TypeError("is traced: call this outside of `jit`.")
        if len(name.encode()) > _longest_name:
            raise ValueError(
                f"has more than {_longest_name} bytes, which llama.cpp refuses. Return "
                "a shorter name from `names`."
            )
        if array.ndim > _most_axes:
            raise ValueError(f"has {array.ndim} axes; GGUF has at most {_most_axes}.")
        if is_implicit(array) and not isinstance(array, QuantizedArray):
            raise TypeError(
                f"is a {type(array).__name__}. Merge adapters and remove wrappers "
                "first."
            )
        kind = type_of(array)

    def make() -> np.ndarray:
        with errors_at(f"{caller}: {name!r}"):
            if isinstance(array, QuantizedArray):
                return to_ggml(kind, array)
            return np.ascontiguousarray(to_numpy(array)).reshape(-1).view(np.uint8)

    return _Tensor(name, kind, tuple(array.shape), make)


def _like(source: GGUFFile, found: dict[str, _Tensor], caller: str) -> list[_Tensor]:
    """Return the tensors in the order of a file, and its tensors that are missing."""
    for name, tensor in found.items():
        expected = source.tensors.get(name)
        if expected is None or expected.shape != tensor.shape:
            has = "no such tensor" if expected is None else f"it as {expected.shape}"
            raise ValueError(
                f"{caller}: {name!r} has the shape {tensor.shape}, but {source.path} "
                f"has {has}. Map paths of the model to its names with `names`."
            )
    tensors = []
    for name, stored in source.tensors.items():
        if name not in found and stored.type.dtype is None:
            raise ValueError(
                f"{caller}: the model has no {name!r}, which {source.path} stores "
                "quantized. Map paths of the model to its names with `names`."
            )
        copy = lambda stored=stored: source.read(stored)
        tensors.append(
            found.get(name) or _Tensor(name, stored.type, stored.shape, copy)
        )
    return tensors


#
# The container
#


def _pairs(
    source: GGUFFile | None, metadata: Mapping[str, Any], tensors: list[_Tensor]
) -> list[bytes]:
    """Return the bytes of key-value pairs."""
    pairs = {}
    if source is not None:
        types = {name: tensor.type for name, tensor in source.tensors.items()}
        is_same = all(types[tensor.name] is tensor.type for tensor in tensors)
        for key in source.metadata:
            if key.startswith(_own_keys) and not (is_same and "file_type" in key):
                continue
            pairs[key] = source.raw_pair(key)
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


def _write(file: Any, pairs: list[bytes], tensors: Iterable[_Tensor]) -> None:
    tensors = list(tensors)
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
    file.write(bytes(-file.tell() % _alignment))
