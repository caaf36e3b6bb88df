"""The command line: `eqquant`, or `python -m eqquant`."""

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Callable, Sequence

from ..formats import as_format, Format, format_names, formats
from ..kernels import cpu
from ._convert import quantize_checkpoint
from ._convert_to import convert_checkpoint, TARGETS
from ._describe import describe_checkpoint
from ._open import open_contents
from .leaves import format_from_json, MAX_SHARD_SIZE


_formats = f"{', '.join(format_names)}; options: nf4:block_size=32,fit=search"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.run is None:
        parser.print_help()
        return 2
    try:
        return options.run(options)
    except (ValueError, TypeError, OSError, ImportError) as error:
        # Print multi-line messages on one line.
        print(f"eqquant: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("eqquant: stopped.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eqquant",
        description="Quantize and inspect checkpoints, and describe kernels.",
    )
    version = importlib.metadata.version("eqquant")
    parser.add_argument("--version", action="version", version=f"eqquant {version}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    def command(name: str, run: Callable, help: str) -> argparse.ArgumentParser:
        add = commands.add_parser(name, help=help, description=f"{help.capitalize()}.")
        add.set_defaults(run=run)
        return add

    add = command("quantize", _quantize, "quantize a checkpoint")
    add.add_argument("src", help="a .safetensors or GGUF file, an index, or a folder")
    add.add_argument(
        "dst", help="a .safetensors file, a folder, or a GGUF file if src is one"
    )
    add.add_argument(
        "--format",
        default="nf4",
        help=f"the format of tensors without a rule: {_formats}; none quantizes only "
        "tensors with a rule (default: %(default)s)",
    )
    add.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATTERN=FORMAT",
        help="the format of tensors whose names match a pattern with * and ?, or none "
        "to keep them; repeatable, the first match wins",
    )
    add.add_argument(
        "--min-size",
        type=int,
        default=256,
        help="the smallest weight to quantize, in elements (default: %(default)s)",
    )
    _add_max_shard_size(add)
    add.add_argument(
        "--no-check-finite", action="store_true", help="allow NaN and infinity"
    )

    add = command("convert", _convert, "convert a checkpoint for another library")
    add.add_argument("src", help="a .safetensors or GGUF file, an index, or a folder")
    add.add_argument("dst", help="a folder, or a GGUF file")
    add.add_argument(
        "--to", required=True, choices=TARGETS, help="the library that reads it"
    )
    add.add_argument(
        "--requantize",
        metavar="FORMAT",
        help="the format of weights that the library cannot store exactly: they are "
        "decoded and quantized again. Without it they are an error",
    )
    _add_max_shard_size(add)
    add.add_argument(
        "--resume",
        action="store_true",
        help="keep finished files if interrupted, and continue after them when the "
        "same command runs again",
    )

    add = command("inspect", _inspect, "list the tensors of a checkpoint")
    add.add_argument("file", help="a .safetensors or GGUF file, an index, or a folder")

    add = command("verify", _verify, "read and check all tensors of a checkpoint")
    add.add_argument("file", help="a .safetensors or GGUF file, an index, or a folder")

    add = command(
        "kernels", _kernels, "print the rules that choose a native CPU kernel"
    )
    add.add_argument(
        "--all", action="store_true", help="include rules for other CPUs than this one"
    )
    return parser


def _add_max_shard_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-shard-size",
        type=int,
        default=MAX_SHARD_SIZE,
        help="the largest size of a file, in bytes (default: %(default)s)",
    )


def _quantize(options: argparse.Namespace) -> int:
    rules = {}
    for rule in options.rule:
        # Split at the first `=`: options of a format also contain `=`.
        pattern, equals, format = rule.partition("=")
        if not equals or not pattern:
            raise ValueError(f"--rule must have the form PATTERN=FORMAT, got {rule!r}.")
        rules[pattern] = parse_format(format)
    replaced = _replaced(options.dst)
    quantize_checkpoint(
        options.src,
        options.dst,
        parse_format(options.format),
        rules=rules,
        min_size=options.min_size,
        max_shard_size=options.max_shard_size,
        check_finite=not options.no_check_finite,
    )
    if replaced:
        print(f"eqquant: replaced {replaced}", file=sys.stderr)
    before, after = map(describe_checkpoint, (options.src, options.dst))
    print(f"before: {before.summary}")
    print(f"after:  {after.summary}: {before.nbytes / after.nbytes:.2f}x smaller")
    return 0


def _convert(options: argparse.Namespace) -> int:
    format = options.requantize and parse_format(options.requantize)
    report = convert_checkpoint(
        options.src,
        options.dst,
        options.to,
        requantize=format,
        max_shard_size=options.max_shard_size,
        resume=options.resume,
    )
    before, after = map(describe_checkpoint, (options.src, options.dst))
    print(report)
    print(f"before: {before.summary}")
    print(f"after:  {after.summary}")
    return 0


def _replaced(path: str) -> str | None:
    """Return a summary with the formats of a complete checkpoint, or None."""
    try:
        found = describe_checkpoint(path)
    except (ValueError, OSError):
        return None  # Nothing is there, or a part of an interrupted call.
    formats = ", ".join(found.formats) or "no quantized tensors"
    return f"{found.summary}, with {formats}"


def parse_format(text: str) -> Format | None:
    """Parse `nf4`, `nf4:block_size=32`, or `none`."""
    if text == "none":
        return None
    name, _, options = text.partition(":")
    if not options:
        return as_format(name)
    fields = {}
    for option in options.split(","):
        field, _, value = option.partition("=")
        try:
            fields[field] = json.loads(value)
        except json.JSONDecodeError:
            fields[field] = value
    return format_from_json({"name": name, "fields": fields}, formats)


def _inspect(options: argparse.Namespace) -> int:
    print(describe_checkpoint(options.file))
    return 0


def _verify(options: argparse.Namespace) -> int:
    found = describe_checkpoint(options.file)
    with open_contents(options.file, (), "verify", decode=True) as contents:
        for name in contents.described:
            contents.read(name)
    checked = "checksums match" if found.kind == "eqquant" else "no checksums"
    print(f"{found.summary}; complete; {checked}")
    return 0


def _kernels(options: argparse.Namespace) -> int:
    print(cpu.describe(everywhere=options.all))
    return 0
