"""Codes in a stream of bits, the first code in the lowest bits."""

import numpy as np


_at_once = 2**18  # Codes.


def pack_bits(codes: np.ndarray, bits: int, word: int = 32) -> np.ndarray:
    """Pack uint8 codes along the last axis, densely, into uint32 words (or uint8). The
    last word of a row is padded with zeros."""
    *lead, size = codes.shape
    rows = codes.reshape(-1, size)
    packed = np.zeros((len(rows), -(-size * bits // word) * word // 8), np.uint8)
    # A bit takes a byte, so only some rows are unpacked at once.
    step = max(1, _at_once // size)
    for i in range(0, len(rows), step):
        some = rows[i : i + step, :, None]
        stream = np.unpackbits(some, axis=-1, count=bits, bitorder="little")
        stream = stream.reshape(len(some), -1)
        found = np.packbits(stream, axis=-1, bitorder="little")
        packed[i : i + step, : found.shape[1]] = found
    packed = packed.reshape(*lead, -1)
    return packed.view("<u4") if word == 32 else packed
