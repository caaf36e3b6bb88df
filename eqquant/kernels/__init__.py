"""One file per back end: numerics only."""
