"""Convert leaves of trees to tensors and records of a file, and back.

Leaves from a file are checked before they are built. All processes that hold a part of
the tree write files. Imports `files`.
"""

from ._contents import Contents
from ._describe import describe, describe_later, is_no_data
from ._formats import format_from_json, format_to_json
from ._leaf import Leaf
from ._processes import processes_of, SingleProcess
from ._shards import MAX_SHARD_SIZE, target_of, write_checkpoint
