"""The command line: `eqquant`, or `python -m eqquant`."""

import argparse
import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Callable, Sequence

from ..arrays import is_quantized
from ..formats import as_format, Format, formats
from ..trees import Report, report
from ._convert import quantize_checkpoint
from ._load import nested
from .files import Source, with_abstract_arrays
from .leaves import Contents, format_from_json, MAX_SHARD_SIZE


_formats = f"{', '.join(formats)}; options: nf4:block_size=32,fit=search"


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
        prog="eqquant", description="Quantize and inspect safetensors checkpoints."
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
    add.add_argument("src", help="a .safetensors file, an index, or a folder")
    add.add_argument("dst", help="a .safetensors file, or a folder")
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
    add.add_argument(
        "--max-shard-size",
        type=int,
        default=MAX_SHARD_SIZE,
        help="the largest size of a file, in bytes (default: %(default)s)",
    )
    add.add_argument(
        "--no-check-finite", action="store_true", help="allow NaN and infinity"
    )

    add = command("inspect", _inspect, "list the tensors of a checkpoint")
    add.add_argument("file", help="a .safetensors file, an index, or a folder")

    add = command("verify", _verify, "read and check all tensors of a checkpoint")
    add.add_argument("file", help="a .safetensors file, an index, or a folder")
    return parser


def _quantize(options: argparse.Namespace) -> int:
    rules = {}
    for rule in options.rule:
        # Split at the first `=`: options of a format also contain `=`.
        pattern, equals, format = rule.partition("=")
        if not equals or not pattern:
            raise ValueError(f"--rule must have the form PATTERN=FORMAT, got {rule!r}.")
        rules[pattern] = parse_format(format)
    replaced = _described(options.dst)
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
    with Source(options.src) as before, Source(options.dst) as after:
        print(f"before: {_summary(before)}")
        print(f"after:  {_summary(after)}: {_size(before) / _size(after):.2f}x smaller")
    return 0


def _described(path: str) -> str | None:
    """Return a summary with the formats of a complete checkpoint, or None."""
    try:
        with Source(path) as source:
            described = Contents(source, (), "quantize").described.values()
            summary = _summary(source)
    except (ValueError, OSError):
        return None  # Nothing is there, or a part of an interrupted call.
    formats = sorted({repr(x.format) for x in described if is_quantized(x)})
    return f"{summary}, with {', '.join(formats) or 'no quantized tensors'}"


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
    with Source(options.file) as source:
        contents = Contents(source, (), "inspect")
        table = with_abstract_arrays(report, nested(contents.described))
        print(_summary(source))
        for key, value in source.metadata.items():
            print(f"{key}: {value}")
    # The reason for an unquantized array depends on its layer, which a file does not
    # describe.
    rows = [
        row if row.format else dataclasses.replace(row, reason="") for row in table.rows
    ]
    print()
    print(Report(tuple(rows)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    with Source(options.file) as source:
        contents = Contents(source, (), "verify")
        for path in contents.described:
            contents.read(path)
        checked = "checksums match" if source.is_ours else "no checksums"
        print(f"{_summary(source)}; complete; {checked}")
    return 0


def _summary(source: Source) -> str:
    files = len(source.files)
    in_files = "1 file" if files == 1 else f"{files} files"
    tensors = f"{len(source.tensors)} tensors"
    return f"{source.path}: {tensors}, {_size(source):,} bytes in {in_files}"


def _size(source: Source) -> int:
    return sum(file.file_size for file in source.files)
