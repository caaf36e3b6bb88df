"""Read checkpoints of other libraries. Each library has a file, which finds its weights
in a checkpoint and describes how to read them. `_read.py` tries all of them. Imports
`files`."""

from ._bitsandbytes import BLOCK_SIZES, DTYPES, STATE
from ._entry import ByRows, Entry, from_codes, NotExact
from ._ggml import Blocks, Numbers, Type, TYPES
from ._gguf import GGUFFile, is_gguf, MAGIC
from ._read import open_entries, read_checkpoint, safetensors_entries
