"""Options of the programs that train in low precision."""

import argparse
from collections.abc import Sequence

import eqquant


SPECS = {
    "bf16": ("bfloat16",) * 3,
    "int8": ("int8",) * 3,
    "fp8": ("float8_e4m3fn", "float8_e5m2", "float8_e5m2"),
    "mxfp8": ("mxfp8",) * 3,
    "nvfp4": ("nvfp4",) * 3,
}


def recipe_of(name: str, stochastic: bool) -> eqquant.training.Recipe:
    """Return the numbers of all products with a weight."""
    return eqquant.training.Recipe(*SPECS[name], stochastic=stochastic)


def parse_with_precision(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse arguments, with options for products and for the optimiser. The recipe in
    the result is None for float32."""
    parser.add_argument(
        "--low-precision",
        choices=SPECS,
        help="Round the operands of products, forward and backward (default: float32).",
    )
    parser.add_argument(
        "--stochastic",
        action="store_true",
        help="Round gradients stochastically in products of low precision.",
    )
    parser.add_argument(
        "--states",
        choices=["fp8", "int8", "fp4"],
        help="Keep the moments of AdamW in 8 or 4 bits (default: float32).",
    )
    options = parser.parse_args(arguments)
    if options.stochastic and not options.low_precision:
        parser.error("--stochastic needs --low-precision")
    name = options.low_precision
    options.recipe = recipe_of(name, options.stochastic) if name else None
    return options
