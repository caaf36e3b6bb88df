"""Codes in a stream of bits, the first code in the lowest bits."""

import numpy as np


def pack_bits(codes: np.ndarray, bits: int, word: int = 32) -> np.ndarray:
    """Pack uint8 codes along the last axis, densely, into uint32 words (or uint8). The
    last word of a row is padded with zeros."""
    *lead, size = codes.shape
    stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    stream = stream.reshape(*lead, size * bits)
    padding = -stream.shape[-1] % word
    stream = np.pad(stream, [(0, 0)] * len(lead) + [(0, padding)])
    packed = np.packbits(stream, axis=-1, bitorder="little")
    return packed.view("<u4") if word == 32 else packed
