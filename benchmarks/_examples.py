"""Import the programs in `examples/`: `from _examples import minilm`."""

import importlib
import pathlib
import sys


sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
minilm = importlib.import_module("minilm")
calibrate_minilm = importlib.import_module("calibrate_minilm")
