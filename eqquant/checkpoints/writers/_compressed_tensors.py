"""Write the layouts of compressed-tensors, which vLLM, SGLang and transformers read."""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from ..._jax import typed
from ...arrays import QuantizedArray
from ...formats import (
    FP8,
    Int2,
    Int3,
    Int4,
    Int5,
    Int6,
    Int8,
    MXFP4,
    NVFP4,
)
from ..files import Path
from ..leaves import MAX_SHARD_SIZE
from ._in_tiles import TILE
from ._library import (
    as_matrix,
    check_block,
    float8_scales,
    layer_prefix,
    Library,
    Matrix,
    no_layout,
    NotHeld,
    Packed,
    power_of_two_scales,
)
from ._pack import pack_bits
from ._write import write_model


Activations = Literal["auto", "float", "int8", "fp8"]
_integers = (Int2, Int3, Int4, Int5, Int6, Int8)


class CompressedTensors(Library):
    """The library compressed-tensors. A weight becomes one of several layouts.

    `activations` selects how the reader rounds activations: in the way of the weight
    (`"auto"`), or not at all (`"float"`), or to 8 bits for each token.
    """

    name = "compressed-tensors"

    def __init__(self, activations: Activations = "auto"):
        self.activations: Activations = activations

    def pack(self, name, q):
        prefix = layer_prefix(name, self.name)
        layouts = {Int8: _int8, FP8: _fp8, MXFP4: _mxfp4, NVFP4: _nvfp4}
        layout = layouts.get(type(q.format), _packed)
        if layout is _packed and type(q.format) not in _integers:
            no_layout(q, self.name, "Int2 to Int8, FP8, MXFP4 and NVFP4")
        matrix = as_matrix(q, self.name)
        parts, words, settings = layout(matrix, _activations(q, self.activations))
        tensors = {prefix + part: array for part, array in parts.items()}
        return Packed(tensors, words, settings)

    def config(self, packed, plain):
        groups: dict[Any, list[str]] = {}
        for name, settings in packed.items():
            module = name.removesuffix("weight").removesuffix(".")
            groups.setdefault(settings, []).append(module)
        described = {
            f"group_{i}": _group(settings, modules)
            for i, (settings, modules) in enumerate(groups.items())
        }
        formats = {group["format"] for group in described.values()}
        layers = [name.removesuffix(".weight") for name in plain]
        config = {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": described,
            "ignore": sorted(layers),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }
        return {"quantization_config": config}


# The tensors, the layout in words, and the settings of a weight: the compression
# format, the arguments of weights, and the arguments of activations.
_Layout = tuple[dict[str, np.ndarray], str, tuple]


def _activations(q: QuantizedArray, chosen: Activations) -> str:
    if chosen != "auto":
        return chosen
    return "int8" if q.compute.activations == "int8" else "float"


def _arguments(num_bits: int, type: str, strategy: str, **others: Any) -> tuple:
    """Return `QuantizationArgs` as hashable pairs."""
    values = {"num_bits": num_bits, "type": type, "symmetric": True, "dynamic": False}
    return tuple(sorted((values | {"strategy": strategy} | others).items()))


_per_token = {
    "float": None,
    "int8": _arguments(8, "int", "token", dynamic=True),
    "fp8": _arguments(8, "float", "token", dynamic=True),
}


def _group(settings: tuple, modules: list[str]) -> dict[str, Any]:
    format, weights, inputs = settings
    listed = lambda x: list(x) if isinstance(x, tuple) else x
    as_json = lambda pairs: pairs and {key: listed(value) for key, value in pairs}
    return {
        "format": format,
        "targets": modules,
        "weights": as_json(weights),
        "input_activations": as_json(inputs),
        "output_activations": None,
    }


def _scales(matrix: Matrix) -> np.ndarray:
    """Return scales in the dtype of the array if it represents them, else float32. The
    library decodes to the dtype of the scales."""
    return matrix.scales_in(matrix.q.dtype, np.float32)


def _int8(matrix: Matrix, activations: str) -> _Layout:
    if activations != "int8":
        return _packed(matrix, activations)
    if not matrix.is_whole:
        raise NotHeld(
            f"has blocks of {matrix.block} and activations of 8 bits, for which the "
            "library has one scale per row. Quantize it with block_size=None, or pass "
            "activations='float'."
        )
    tensors = {"weight": matrix.codes, "weight_scale": _scales(matrix)}
    settings = "int-quantized", _arguments(8, "int", "channel"), _per_token["int8"]
    return tensors, "int8 per channel, int8 activations", settings


def _packed(matrix: Matrix, activations: str) -> _Layout:
    bits = matrix.q.format.bits
    if activations == "fp8":
        activations = "float"
    codes = matrix.codes
    if bits == 8:
        codes = (codes.astype(np.int16) + 128).astype(np.uint8)
    zeros = matrix.zero_points(2**bits)
    tensors = {
        "weight_packed": pack_bits(codes, bits).view(np.int32),
        "weight_scale": _scales(matrix),
        "weight_shape": np.array(codes.shape, np.int64),
    }
    symmetric = zeros is None
    if zeros is not None:
        packed = pack_bits(np.ascontiguousarray(zeros.T), bits).view(np.int32)
        tensors["weight_zero_point"] = np.ascontiguousarray(packed.T)
    if matrix.is_whole:
        weights = _arguments(bits, "int", "channel", symmetric=symmetric)
        words = "per channel"
    else:
        group = {"group_size": matrix.block, "symmetric": symmetric}
        weights = _arguments(bits, "int", "group", **group)
        words = f"by groups of {matrix.block}"
    words = f"int{bits} {words}{'' if symmetric else ', affine'}"
    return tensors, words, ("pack-quantized", weights, _per_token[activations])


def _fp8(matrix: Matrix, activations: str) -> _Layout:
    if matrix.q.format.float8 != "e4m3fn":
        raise NotHeld(
            f"has the kind {matrix.q.format.float8!r}; the library has 'e4m3fn'. "
            "Quantize the original weight to it."
        )
    scales, others = _scales(matrix), {}
    if matrix.is_whole:
        is_one = bool(np.all(scales == scales[0]))
        strategy = "tensor" if is_one and len(scales) > 1 else "channel"
        scales = scales[:1, 0] if strategy == "tensor" else scales
        words = f"per {strategy}"
    else:
        scales, strategy = _tiles(matrix, scales), "block"
        others = {"block_structure": (TILE, TILE)}
        words = f"by blocks of {TILE} x {TILE}"
    tensors = {"weight": matrix.codes.view(jnp.float8_e4m3fn), "weight_scale": scales}
    inputs = _per_token["fp8" if activations == "fp8" else "float"]
    weights = _arguments(8, "float", strategy, **others)
    return tensors, f"FP8 {words}", ("float-quantized", weights, inputs)


def _tiles(matrix: Matrix, scales: np.ndarray) -> np.ndarray:
    """Return the scale of each tile of 128 rows and 128 columns."""
    tiles = scales[::TILE]
    same = np.repeat(tiles, TILE, axis=0)[: len(scales)] == scales
    if matrix.block != TILE or not np.all(same):
        raise NotHeld(
            f"has FP8 in blocks of {matrix.block} columns; the library has one scale "
            f"per row, tensor, or tile of {TILE} rows and {TILE} columns. Quantize "
            "it with block_size=None, or with eqquant.checkpoints.quantize_in_tiles."
        )
    return np.ascontiguousarray(tiles)


def _fp4_bytes(matrix: Matrix) -> np.ndarray:
    """Return two codes per byte, the first in the low half."""
    return pack_bits(matrix.codes, 4, word=8)


def _mxfp4(matrix: Matrix, activations: str) -> _Layout:
    del activations
    check_block(matrix, 32)
    exponents = power_of_two_scales(matrix)
    tensors = {"weight_packed": _fp4_bytes(matrix), "weight_scale": exponents}
    types = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    weights = _arguments(4, "float", "group", group_size=32, **types)
    return tensors, "MXFP4", ("mxfp4-pack-quantized", weights, None)


def _nvfp4(matrix: Matrix, activations: str) -> _Layout:
    del activations
    check_block(matrix, 16)
    codes, unit = float8_scales(matrix)
    tensors = {
        "weight_packed": _fp4_bytes(matrix),
        "weight_scale": codes.view(jnp.float8_e4m3fn),
        "weight_global_scale": np.full(1, _divisor(matrix, codes, unit), np.float32),
    }
    types = dict.fromkeys(("scale_dtype", "zp_dtype"), "torch.float8_e4m3fn")
    weights = _arguments(4, "float", "tensor_group", group_size=16, **types)
    return tensors, "NVFP4", ("nvfp4-pack-quantized", weights, None)


def _divisor(matrix: Matrix, scales: np.ndarray, unit: np.float32) -> np.float32:
    """Return the number by which the library divides 8-bit scales. Quotients may differ
    from products in the last bit, and only values in bfloat16 matter."""
    blocks = matrix.codes.reshape(*scales.shape, -1)
    pairs = np.unique(scales[..., None].astype(np.int16) << 4 | blocks)
    levels = np.array(NVFP4.codebook, np.float32)[pairs & 15]
    factors = (pairs >> 4).astype(np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    rounded = lambda x: (levels * x).astype(jnp.bfloat16).view(np.uint16)
    divisor = np.float32(1) / unit if unit else np.float32(1)
    nearby = (np.nextafter(divisor, np.float32(end)) for end in (0, np.inf))
    for candidate in (divisor, *nearby):
        if np.array_equal(rounded(factors / candidate), rounded(factors * unit)):
            return candidate
    raise NotHeld(
        "has values half-way between two bfloat16 numbers. The library divides where "
        "NVFP4 multiplies, and would round some of them to the other number. Quantize "
        "it with 'mxfp4', or from float32 values."
    )


@typed
def write_compressed_tensors(
    folder: Path,
    model: Any,
    *,
    names: Callable[[str], Any] | None = None,
    source: Path | None = None,
    activations: Activations = "auto",
    max_shard_size: int | None = MAX_SHARD_SIZE,
) -> None:
    """Write a quantized model as compressed-tensors, which vLLM, SGLang and
    transformers read. Codes and scales are not changed.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import tempfile

        model = eqx.nn.MLP(64, 32, 128, 2, key=jax.random.key(0))
        model = eqquant.quantize_tree(model, eqquant.Int4(scale_dtype="bfloat16"))
        folder = tempfile.mkdtemp()
        eqquant.checkpoints.write_compressed_tensors(folder, model)
        read = eqquant.checkpoints.read_checkpoint(folder)["layers.0.weight"]
        assert (read.dequantize() == model.layers[0].weight.dequantize()).all()
        ```

    - [`eqquant.Int8`][] per channel that rounds activations to 8 bits becomes
        `int-quantized` (W8A8, dynamic per token).
    - [`eqquant.Int2`][] to [`eqquant.Int8`][], per channel or in blocks, become
        `pack-quantized`. Offsets must be zero points: see
        [`eqquant.checkpoints.quantize_with_zero_points`][].
    - [`eqquant.FP8`][] per channel, per tensor, or with equal scales in tiles of
        128 x 128 (see [`eqquant.checkpoints.quantize_in_tiles`][]) becomes
        `float-quantized`.
    - [`eqquant.MXFP4`][] becomes `mxfp4-pack-quantized`.
    - [`eqquant.NVFP4`][] that was quantized with `axis=(0, 1)`, which gives one
        float32 factor per tensor, becomes `nvfp4-pack-quantized`.

    Scales are written in the dtype of the array if it represents them, otherwise in
    float32. The library decodes to the dtype of the scales, and FP4 to bfloat16. Each
    weight is read back before it is written, and compared in this dtype.

    **Arguments:**

    - `folder`: receives `model.safetensors`, or several shards and their index, and
        `config.json`.
    - `model`: a pytree, or a dictionary from names to arrays. Matrices have one row per
        output, like `eqx.nn.Linear`. Functions and Python numbers are left out.
    - `names`: a function from the path of an array to the name of its tensor, as in
        [`eqquant.load_quantized`][]: a list of names unstacks an array, and `None`
        leaves it out. Names of quantized weights must end in `weight`.
    - `source`: the folder of the original model. Its configuration and tokenizer are
        copied. Names and shapes must equal its tensors, and tensors that the model
        lacks are copied.
    - `activations`: `"int8"` or `"fp8"` if the reader rounds activations for each
        token, `"float"` if it does not. `"auto"` is `"int8"` for INT8 weights whose
        [`eqquant.kernels.Compute`][] rounds activations, and `"float"` for others.
    - `max_shard_size`: the number of bytes above which the file is split; `None` always
        writes one file.

    **Raises:**

    `ValueError` with the name, the format and the way out, for an array that the
    library cannot store exactly. The folder then keeps its contents.
    """
    caller = "write_compressed_tensors"
    library = CompressedTensors(activations)
    write_model(library, folder, model, names, source, max_shard_size, caller)
