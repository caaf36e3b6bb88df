"""Codes packed into int32, the first code in the lowest bits."""

import numpy as np


def count_codes(packed: int, bits: int) -> int:
    """Return the number of codes in `packed` int32 values; 0 if the last code would be
    incomplete."""
    return packed * 32 // bits if packed % _period(bits) == 0 else 0


def _period(bits: int) -> int:
    """Return the smallest number of int32 values that hold whole codes."""
    return 3 if bits == 3 else 1


def unpack_int32(packed: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Unpack int32 values to uint8 codes along an axis. 3-bit codes may cross from one
    int32 to the next, so three int32 hold 32 codes."""
    period = _period(bits)
    packed = np.moveaxis(packed.view(np.uint32), axis, 0)
    packed = packed.reshape(len(packed) // period, period, *packed.shape[1:])
    count, mask = count_codes(period, bits), np.uint32(2**bits - 1)
    out = np.empty((len(packed), count, *packed.shape[2:]), np.uint8)
    for i in range(count):
        index, shift = divmod(i * bits, 32)
        codes = packed[:, index] >> np.uint32(shift)
        if shift + bits > 32:
            codes |= packed[:, index + 1] << np.uint32(32 - shift)
        out[:, i] = codes & mask
    return np.moveaxis(out.reshape(len(packed) * count, *out.shape[2:]), 0, axis)
