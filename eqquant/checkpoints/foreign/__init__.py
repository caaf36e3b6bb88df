"""Read checkpoints of other libraries. Each library has a file, which finds its weights
in a checkpoint and describes how to read them. `_read.py` tries all of them. Imports
`files`."""

from ._bitsandbytes import (
    BLOCK_SIZES as BLOCK_SIZES,
    DTYPES as DTYPES,
    STATE as STATE,
)
from ._entry import (
    ByRows as ByRows,
    Entry as Entry,
    from_codes as from_codes,
    NotExact as NotExact,
)
from ._ggml import Blocks as Blocks, Numbers as Numbers, Type as Type, TYPES as TYPES
from ._gguf import GGUFFile as GGUFFile, is_gguf as is_gguf, MAGIC as MAGIC
from ._read import (
    open_entries as open_entries,
    read_checkpoint as read_checkpoint,
    safetensors_entries as safetensors_entries,
)
