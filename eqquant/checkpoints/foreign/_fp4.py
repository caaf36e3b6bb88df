"""MXFP4 and NVFP4: two E2M1 codes per byte, the first in the low half.

compressed-tensors stores `weight_packed` and `weight_scale`, and for NVFP4
`weight_global_scale`, by which it divides. ModelOpt stores NVFP4 as `weight`,
`weight_scale` and `weight_scale_2`, by which it multiplies. Hugging Face stores experts
in MXFP4 as `NAME_blocks` and `NAME_scales`, and transposes them when it decodes.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from ...arrays import from_components
from ...formats import Float8Scales, MXFP4, NVFP4, pack, PowerOfTwoScales
from ..files import Source
from ._entry import Entry, NotExact
from ._parts import find_parts, Parts


_library = "compressed-tensors"
_levels = np.array(MXFP4.codebook, np.float32)
_bfloat16 = np.dtype(jnp.bfloat16)
_float8 = "float8_e4m3fn"


def fp4_entries(source: Source) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for parts in find_parts(source, "weight_packed", _library):
        if parts.tensor("weight_packed").dtype == np.uint8:
            is_nvfp4 = "weight_global_scale" in parts
            make = _divided if is_nvfp4 else _compressed_mxfp4
            entries[parts.weight] = make(parts)
    for parts in find_parts(source, "weight_scale_2", "ModelOpt"):
        if "weight" in parts and parts.tensor("weight").dtype == np.uint8:
            entries[parts.weight] = _multiplied(parts)
    for found in source.tensors:
        weight = found.removesuffix("_blocks")
        if weight != found and f"{weight}_scales" in source.tensors:
            parts = Parts(source, "", "MXFP4", weight)
            entries[weight] = _experts(parts, weight)
    return entries


#
# MXFP4
#


def _compressed_mxfp4(parts: Parts) -> Entry:
    stored = parts.look_up("weight_packed", ("uint8",), (None, None))
    rows, columns = stored.shape[0], 2 * stored.shape[1]
    parts.look_up("weight_scale", ("uint8",), (rows, columns // 32))
    if columns % 32 or not rows or not columns:
        parts.fail(f"has rows of {columns}, which blocks of 32 do not divide.")
    read = lambda: (parts.read("weight_packed"), parts.read("weight_scale"))
    return mxfp4_entry(parts, (rows, columns), read, f"{_library}, {MXFP4()!r}")


def _experts(parts: Parts, name: str) -> Entry:
    """Describe a stack of experts, which has the axes `(experts, inputs, outputs)`."""
    stored = parts.tensor(f"{name}_blocks")
    if stored.dtype != np.uint8 or len(stored.shape) < 3 or stored.shape[-1] != 16:
        parts.fail(
            f"has '{name}_blocks' of {stored.dtype} and {stored.shape}, but needs "
            "uint8 and a last axis of 16 bytes."
        )
    lead, blocks = stored.shape[:-2], stored.shape[-2]
    parts.look_up(f"{name}_blocks", ("uint8",), stored.shape)
    parts.look_up(f"{name}_scales", ("uint8",), (*lead, blocks))

    def read():
        packed = parts.read(f"{name}_blocks").reshape(*lead, blocks * 16)
        return packed, parts.read(f"{name}_scales")

    shape = (*lead, blocks * 32)
    return mxfp4_entry(parts, shape, read, f"MXFP4, {MXFP4()!r}", transposed=True)


def mxfp4_entry(
    parts: Parts,
    shape: tuple[int, ...],
    read: Callable[[], tuple[np.ndarray, np.ndarray]],
    kind: str,
    transposed: bool = False,
) -> Entry:
    """Describe MXFP4 codes and exponents. `transposed` swaps the last two axes of the
    result."""

    def decode() -> np.ndarray:
        packed, exponents = read()
        with np.errstate(over="ignore"):
            scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
            values = _values(_codes(packed), scales).astype(_bfloat16)
        return np.swapaxes(values, -1, -2) if transposed else values

    def quantized():
        packed, exponents = read()
        codes = _codes(packed)
        blocks = codes.reshape(*exponents.shape, -1)
        if np.any(exponents == 255):
            raise NotExact("has scales of 2 ** 128, which are infinite in float32.")
        if np.any((exponents == 0) & np.any(blocks & 7, -1)):
            raise NotExact("has scales of 2 ** -127, which XLA flushes to 0.")
        scales = PowerOfTwoScales(jnp.asarray(exponents))
        array = _array(codes, scales, MXFP4(), _bfloat16)
        return array.mT if transposed else array

    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return parts.entry(shape, _bfloat16, decode, quantized, (kind, True))


#
# NVFP4
#


def _divided(parts: Parts) -> Entry:
    """Describe NVFP4 of compressed-tensors, which decodes it to bfloat16."""
    stored = parts.look_up("weight_packed", ("uint8",), (None, None))
    parts.look_up("weight_global_scale", ("float32",), (1,), ())
    shape = _shape_of_nvfp4(parts, stored.shape)

    def decode() -> np.ndarray:
        codes = _codes(parts.read("weight_packed"))
        scales = parts.read("weight_scale").astype(np.float32)
        with np.errstate(all="ignore"):
            scales /= parts.read("weight_global_scale").reshape(1)
            return _values(codes, scales).astype(_bfloat16)

    def quantized():
        stored = parts.read("weight_scale")
        divisor = parts.read("weight_global_scale").reshape(1)
        factors = np.unique(stored.view(np.uint8)).view(stored.dtype).astype(np.float32)
        # The product with a reciprocal may differ from the quotient in the last bit.
        with np.errstate(all="ignore"):
            unit, expected = np.float32(1) / divisor, _products(factors / divisor)
            nearby = (np.nextafter(unit, np.float32(end)) for end in (0, np.inf))
            for candidate in (unit, *nearby):
                if np.array_equal(_products(factors * candidate), expected):
                    codes = _codes(parts.read("weight_packed"))
                    return _nvfp4(codes, stored, candidate, _bfloat16)
        raise NotExact("has scales whose reciprocal changes values in bfloat16.")

    kind = f"{_library}, {NVFP4()!r}"
    return parts.entry(shape, _bfloat16, decode, quantized, (kind, True))


def _products(scales: np.ndarray) -> np.ndarray:
    return (scales[:, None] * _levels).astype(_bfloat16).astype(np.float32)


def _multiplied(parts: Parts) -> Entry:
    """Describe NVFP4 of ModelOpt."""
    stored = parts.look_up("weight", ("uint8",), (None, None))
    parts.look_up("weight_scale_2", ("float32",), (), (1,))
    shape = _shape_of_nvfp4(parts, stored.shape)

    def read():
        unit = parts.read("weight_scale_2").reshape(1)
        return parts.read("weight"), parts.read("weight_scale"), unit

    return nvfp4_entry(parts, shape, read, f"ModelOpt, {NVFP4()!r}")


def nvfp4_entry(
    parts: Parts,
    shape: tuple[int, int],
    read: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]],
    kind: str,
) -> Entry:
    """Describe NVFP4 codes, 8-bit scales, and the factor of a tensor."""

    def decode() -> np.ndarray:
        packed, scales, unit = read()
        with np.errstate(all="ignore"):
            return _values(_codes(packed), scales.astype(np.float32) * unit)

    def quantized():
        packed, scales, unit = read()
        return _nvfp4(_codes(packed), scales, unit, np.dtype(np.float32))

    return parts.entry(shape, np.dtype(np.float32), decode, quantized, (kind, True))


def _shape_of_nvfp4(parts: Parts, stored: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = stored[0], 2 * stored[1]
    if columns % 16 or not rows or not columns:
        parts.fail(f"has rows of {columns}, which blocks of 16 do not divide.")
    parts.look_up("weight_scale", (_float8,), (rows, columns // 16))
    return rows, columns


def _nvfp4(codes: np.ndarray, scales: np.ndarray, unit: np.ndarray, dtype: np.dtype):
    decoded = scales.astype(np.float32) * unit
    tiny = np.finfo(np.float32).tiny / 0.5
    if not np.all(np.isfinite(decoded)) or np.any((decoded < tiny) & (decoded != 0)):
        raise NotExact("has scales that are negative, subnormal or not finite.")
    units = np.broadcast_to(unit.reshape(1, 1), (len(codes), 1))
    short = Float8Scales(jnp.asarray(scales.view(np.uint8)), jnp.asarray(units))
    return _array(codes, short, NVFP4(), dtype)


#
# Both
#


def _codes(packed: np.ndarray) -> np.ndarray:
    codes = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1)
    return codes.reshape(*packed.shape[:-1], -1)


def _values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    values = _levels[codes].reshape(*scales.shape, -1)
    return (values * scales[..., None]).reshape(codes.shape)


def _array(codes: np.ndarray, scales, format: MXFP4 | NVFP4, dtype: np.dtype):
    groups = codes.reshape(*codes.shape[:-1], -1, format.group)
    packed = pack(groups, format.bits).reshape(*codes.shape[:-1], -1)
    size = codes.shape[-1]
    packed = jnp.asarray(packed)
    return from_components(packed, scales, format, dtype=dtype, size=size)
