"""A weight that observes what it multiplies: its structure, and what it sees."""

from ._array import ObservedArray as ObservedArray
from ._structure import Observed as Observed
