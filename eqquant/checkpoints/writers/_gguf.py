"""Write models to GGUF files, which llama.cpp reads."""

import contextlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import PyTree

from ..._jax import typed
from ..files import Path
from ..foreign import GGUFFile
from ._gguf_file import GGUFTensor, write_gguf_tensors
from ._write import named_arrays, Names


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
    | `formats.DenseTernary()` | `TQ1_0` |
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
    - `source`: a GGUF file whose metadata and tokenizer are copied. If it has tensors,
        the arrays must have their names and shapes, and tensors of floats and integers
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
    tensors = [
        GGUFTensor.of(name, array, lambda array=array: array, caller)
        for name, array in arrays.items()
    ]
    write_gguf_like(target, tensors, source, metadata or {}, caller)


def write_gguf_like(
    target: pathlib.Path,
    tensors: Sequence[GGUFTensor],
    source: Path | None,
    metadata: Mapping[str, Any],
    caller: str,
) -> None:
    """Write tensors one at a time, with the metadata, the order and the other tensors
    of the GGUF file `source`."""
    with contextlib.ExitStack() as stack:
        original = None if source is None else stack.enter_context(GGUFFile(source))
        if original is not None and original.tensors:
            tensors = _like(original, {t.name: t for t in tensors}, caller)
        write_gguf_tensors(target, tensors, original, metadata, caller)


def _like(
    source: GGUFFile, found: dict[str, GGUFTensor], caller: str
) -> list[GGUFTensor]:
    """Return the tensors in the order of a file, and its tensors that are missing."""
    for name, tensor in found.items():
        expected = source.tensors.get(name)
        if expected is None or expected.shape != tensor.shape:
            has = "no such tensor" if expected is None else f"it as {expected.shape}"
            raise ValueError(
                f"{caller}: {name!r} has the shape {tensor.shape}, but {source.path} "
                f"has {has}. Map paths of the model to its names with `names`."
            )
    for name, stored in source.tensors.items():
        if name not in found and stored.type.dtype is None:
            raise ValueError(
                f"{caller}: the model has no {name!r}, which {source.path} stores "
                "quantized. Map paths of the model to its names with `names`."
            )
    return [found.get(name) or GGUFTensor.copy(source, name) for name in source.tensors]
