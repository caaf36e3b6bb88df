"""Pack codes and scales to blocks of ggml, the inverse of `foreign/_ggml.py`.

Unpacking only moves bits, except the ternary digits of TQ1_0. So the bits of a block
are found by unpacking blocks in which a single bit is set.
"""

import dataclasses
import functools as ft

import numpy as np

from ..foreign import Blocks, Type, TYPES


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Bits to move: `block[byte] |= shift(number[element] & mask)`. No byte occurs
    twice."""

    bytes: np.ndarray
    elements: np.ndarray
    masks: np.ndarray
    left: np.ndarray
    right: np.ndarray


def pack_blocks(type: Type, blocks: Blocks) -> np.ndarray:
    """Return the bytes of blocks, `(count, nbytes)`. Raise a `ValueError` if a number
    needs more bits than the type has."""
    if type.name == "TQ1_0":
        return _tq1_0(blocks)
    numbers, layers = _numbers(blocks), _layers(type.name)
    for name, values in numbers.items():
        bits = np.uint16(0)
        for layer in (layer for of, layer in layers if of == name):
            bits |= np.bitwise_or.reduce(layer.masks)
        if np.any(values & ~bits):
            part = name.replace(".", ", ")
            raise ValueError(
                f"has numbers ({part}) that {type.name} cannot store: they need more "
                f"than {int(bits).bit_count()} bits."
            )
    raw = np.zeros((len(blocks.codes), type.nbytes), np.uint8)
    for name, layer in layers:
        moved = numbers[name][:, layer.elements] & layer.masks
        raw[:, layer.bytes] |= (moved << layer.left >> layer.right).astype(np.uint8)
    assert type.unpack is not None
    read = _numbers(type.unpack(raw))
    assert all(np.array_equal(read[name], numbers[name]) for name in numbers)
    return raw


def _tq1_0(blocks: Blocks) -> np.ndarray:
    """Pack five ternary digits per byte, as 32 bytes, 16 bytes, and 4 bytes of four."""
    parts, digits = [], blocks.unpacked()
    for start, count, size in ((0, 5, 32), (160, 5, 16), (240, 4, 4)):
        part = digits[:, start : start + count * size].reshape(-1, count, size)
        powers = 3 ** np.arange(4, 4 - count, -1, dtype=np.uint16)[:, None]
        # The first digit is the integer part of three times the byte / 256.
        values = (part * powers).sum(1, dtype=np.uint16)
        parts.append((values * np.uint16(256) + np.uint16(242)) // np.uint16(243))
    units = blocks.scales.units.view(np.uint8).reshape(len(digits), -1)
    return np.concatenate([*(part.astype(np.uint8) for part in parts), units], 1)


def _numbers(blocks: Blocks) -> dict[str, np.ndarray]:
    """Return the stored numbers of blocks as bits."""
    found = {"codes": blocks.unpacked()}
    for name in ("scales", "offsets"):
        if (part := getattr(blocks, name)) is None:
            continue
        found[f"{name}.units"] = part.units
        if part.integers is not None:
            found[f"{name}.integers"] = part.integers
    as_bits = lambda x: np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")
    return {name: as_bits(x).astype(np.uint16) for name, x in found.items()}


@ft.cache
def _layers(name: str) -> list[tuple[str, _Layer]]:
    (type,) = (type for type in TYPES.values() if type.name == name)
    assert type.unpack is not None
    # Row `8 * byte + bit` has only this bit.
    bits = np.eye(8 * type.nbytes, dtype=np.uint8)
    single = np.packbits(bits, axis=1, bitorder="little")
    found = []
    for name, numbers in _numbers(type.unpack(single)).items():
        # The bits that a byte receives from one element with one shift.
        moves: dict[tuple[int, int, int], int] = {}
        for row, element in zip(*np.nonzero(numbers), strict=True):
            value = int(numbers[row, element])
            byte, bit = divmod(int(row), 8)
            key = byte, int(element), bit - (value.bit_length() - 1)
            moves[key] = moves.get(key, 0) | value
        by_byte: dict[int, list[tuple[int, ...]]] = {}
        for (byte, element, shift), mask in moves.items():
            by_byte.setdefault(byte, []).append((byte, element, mask, shift))
        for i in range(max(map(len, by_byte.values()))):
            layer = [of[i] for of in by_byte.values() if i < len(of)]
            bytes, elements, masks, shifts = np.array(layer).T
            left, right = np.maximum(shifts, 0), np.maximum(-shifts, 0)
            words = (x.astype(np.uint16) for x in (masks, left, right))
            found.append((name, _Layer(bytes, elements, *words)))
    return found
