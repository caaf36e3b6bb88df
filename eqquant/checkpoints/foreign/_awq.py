"""AWQ weights in safetensors, as AutoAWQ packs them for its GEMM kernels.

A code has 4 bits, and a weight has a column for each output: `qweight` is int32
`(inputs, outputs / 8)`, `qzeros` is int32 `(groups, outputs / 8)`, and `scales` are
`(groups, outputs)`. Each int32 holds eight outputs: first the even ones, then the odd
ones.
"""

import numpy as np

from ..files import Source
from ._config import PackingConfig
from ._entry import Entry
from ._int32 import unpack_int32
from ._parts import Parts, prefixes
from ._zero_points import SCALE_DTYPES, ZeroPointWeight


def awq_entries(source: Source, config: PackingConfig) -> dict[str, Entry]:
    config.one_of("bits", (4,))
    config.check_layout(("version", "checkpoint_format", "format"), ("gemm",))
    block = config.block_size()
    entries = {}
    for prefix in prefixes(source, "qweight"):
        parts = Parts(source, prefix, "AWQ")
        entries[parts.weight] = _weight(parts, block).entry()
    return entries


def _weight(parts: Parts, block: int | None) -> ZeroPointWeight:
    inputs, packed = parts.look_up("qweight", ("int32",), (None, None)).shape
    if not inputs or not packed:
        raise ValueError(f"{parts.where}: 'qweight' has the size 0.")
    blocks = 1 if block is None else -(-inputs // block)
    scales = parts.look_up("scales", SCALE_DTYPES, (blocks, 8 * packed))
    parts.look_up("qzeros", ("int32",), (blocks, packed))
    return ZeroPointWeight(
        "AWQ",
        parts.where,
        (8 * packed, inputs),
        scales.dtype,
        tuple(parts.names),
        bits=4,
        block=block,
        symmetric=False,
        codes=lambda: _unpack(parts.read("qweight")),
        scales=lambda: parts.read("scales").T,
        zeros=lambda: _unpack(parts.read("qzeros")).astype(np.int32),
    )


def _unpack(packed: np.ndarray) -> np.ndarray:
    """Unpack int32 `(n, outputs / 8)` to codes `(outputs, n)`."""
    codes = unpack_int32(packed, 4, 1).reshape(len(packed), -1, 2, 4)
    return codes.swapaxes(2, 3).reshape(len(packed), -1).T
