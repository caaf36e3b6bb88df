"""A weight with a low-rank adapter: its structure and its products."""

from ._array import LoraArray
