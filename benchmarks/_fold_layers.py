"""Quantize a decoder whose rotations are folded into its weights."""

from typing import Any

import eqquant
import numpy as np
from _llama_example import comparison


def folded(
    model: Any, tokens: np.ndarray, format: eqquant.formats.Format | str | None
) -> Any:
    """Return the model with its matrices in `format`, by GPTQ with `tokens`, `(count,
    length)`, and its embedding in INT8."""
    result = eqquant.calibration.fold_rotations(comparison.forward, model, tokens[:1])
    stats = comparison.calibrate(result.model, tokens)
    return comparison.quantize(result.model, format, stats, rotate=result.rotate)
