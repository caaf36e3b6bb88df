"""Make the helper modules in `benchmarks/` and `examples/llama/` importable."""

import pathlib
import sys


ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "examples" / "llama")]
