"""Read checkpoints of other libraries. Each library has a file, which finds its weights
in a checkpoint and describes how to read them. `_read.py` tries all of them. Imports
`files`."""

from ._entry import Entry as Entry
from ._gguf import GGUFFile as GGUFFile, is_gguf as is_gguf
from ._read import (
    open_entries as open_entries,
    read_checkpoint as read_checkpoint,
    safetensors_entries as safetensors_entries,
)
from ._write_bitsandbytes import write_bitsandbytes as write_bitsandbytes
