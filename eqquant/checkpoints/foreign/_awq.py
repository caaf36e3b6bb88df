"""Weights of AWQ in safetensors, as AutoAWQ packs them for its GEMM kernels.

A code has 4 bits, and a weight has a column for each output: `qweight` is int32 of
`(inputs, outputs / 8)`, `qzeros` is int32 of `(groups, outputs / 8)`, and `scales` are
`(groups, outputs)`. Each word holds eight outputs: first the even ones, then the odd.
"""

import numpy as np

from ..files import Source
from ._config import PackingConfig
from ._entry import Entry
from ._parts import Parts, prefixes
from ._words import unpack_words
from ._zero_points import SCALE_DTYPES, ZeroPointWeight


def awq_entries(source: Source, config: PackingConfig) -> dict[str, Entry]:
    config.one_of("bits", (4,))
    config.layout(("version", "checkpoint_format", "format"), ("gemm",))
    block = config.block_size()
    entries = {}
    for prefix in prefixes(source, "qweight"):
        parts = Parts(source, prefix, "AWQ")
        entries[parts.weight] = _weight(parts, block).entry()
    return entries


def _weight(parts: Parts, block: int | None) -> ZeroPointWeight:
    inputs, words = parts.look_up("qweight", ("int32",), (None, None)).shape
    if not inputs or not words:
        raise ValueError(f"{parts.where} has nothing in 'qweight'.")
    blocks = 1 if block is None else -(-inputs // block)
    scales = parts.look_up("scales", SCALE_DTYPES, (blocks, 8 * words))
    parts.look_up("qzeros", ("int32",), (blocks, words))
    return ZeroPointWeight(
        "AWQ",
        parts.where,
        (8 * words, inputs),
        scales.dtype,
        tuple(parts.names),
        bits=4,
        block=block,
        symmetric=False,
        codes=lambda: _unpack(parts.read("qweight")),
        scales=lambda: parts.read("scales").T,
        zeros=lambda: _unpack(parts.read("qzeros")).astype(np.int32),
    )


def _unpack(words: np.ndarray) -> np.ndarray:
    """`(outputs, n)` of `(n, outputs / 8)`."""
    codes = unpack_words(words, 4, 1).reshape(len(words), -1, 2, 4)
    return codes.swapaxes(2, 3).reshape(len(words), -1).T
