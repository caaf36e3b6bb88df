"""Codes that are packed in words of 32 bits, the first in the lowest bits."""

import numpy as np


def holds(words: int, bits: int) -> int:
    """How many codes of so many bits fill so many words; 0 if none do."""
    return words * 32 // bits if words % _period(bits) == 0 else 0


def _period(bits: int) -> int:
    """How many words end with a code."""
    return 3 if bits == 3 else 1


def unpack_words(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The codes of int32 words, uint8, along an axis. Three bits run on from a word to
    the next, so that three words hold 32 codes."""
    period = _period(bits)
    words = np.moveaxis(words.view(np.uint32), axis, 0)
    words = words.reshape(len(words) // period, period, *words.shape[1:])
    count, mask = holds(period, bits), np.uint32(2**bits - 1)
    out = np.empty((len(words), count, *words.shape[2:]), np.uint8)
    for i in range(count):
        word, shift = divmod(i * bits, 32)
        codes = words[:, word] >> np.uint32(shift)
        if shift + bits > 32:
            codes |= words[:, word + 1] << np.uint32(32 - shift)
        out[:, i] = codes & mask
    return np.moveaxis(out.reshape(len(words) * count, *out.shape[2:]), 0, axis)
