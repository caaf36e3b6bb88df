"""Import the programs in `examples/llama`: `from _llama_example import load`."""

import importlib
import pathlib
import sys


sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples" / "llama"))
comparison = importlib.import_module("comparison")
folder = importlib.import_module("folder")
load = importlib.import_module("load")
model = importlib.import_module("model")
names = importlib.import_module("names")
sampling = importlib.import_module("sampling")
text = importlib.import_module("text")
