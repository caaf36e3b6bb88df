"""The command line: `python -m eqquant`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from ..formats import as_format, Format, formats
from ..trees import Report, report
from ._convert import quantize_checkpoint
from ._load import nested
from .files import about_arrays, Source
from .leaves import Contents, format_from_json, MAX_SHARD_SIZE


_formats = f"{', '.join(formats)}; with options: nf4:block_size=32,scale_search=true"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, TypeError, OSError, ImportError) as error:
        # In one line, whatever the message has.
        print(f"eqquant: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("eqquant: stopped.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eqquant", description="Quantized checkpoints in safetensors."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add = commands.add_parser("quantize", help="quantize a checkpoint")
    add.set_defaults(run=_quantize)
    add.add_argument("src", help="a .safetensors file, an index, or a folder")
    add.add_argument("dst", help="a .safetensors file, or a folder")
    add.add_argument("--format", default="nf4", help=f"{_formats}; none: only rules")
    add.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATTERN=FORMAT",
        help="a format for the tensors that a pattern with * and ? matches, or none to "
        "leave them; the first that matches wins",
    )
    add.add_argument("--min-size", type=int, default=256, help="of a weight: elements")
    add.add_argument(
        "--max-shard-size", type=int, default=MAX_SHARD_SIZE, help="of a file: bytes"
    )
    add.add_argument(
        "--no-check-finite", action="store_true", help="take NaN and infinity as well"
    )

    add = commands.add_parser("inspect", help="say what a checkpoint holds")
    add.set_defaults(run=_inspect)
    add.add_argument("file", help="a .safetensors file, an index, or a folder")

    add = commands.add_parser("verify", help="read everything, and check everything")
    add.set_defaults(run=_verify)
    add.add_argument("file", help="a .safetensors file, an index, or a folder")
    return parser


def _quantize(options: argparse.Namespace) -> int:
    rules = {}
    for rule in options.rule:
        # The first one: options of a format have it as well.
        pattern, equals, format = rule.partition("=")
        if not equals or not pattern:
            raise ValueError(f"--rule must be PATTERN=FORMAT, got {rule!r}.")
        rules[pattern] = parse_format(format)
    quantize_checkpoint(
        options.src,
        options.dst,
        parse_format(options.format),
        rules=rules,
        min_size=options.min_size,
        max_shard_size=options.max_shard_size,
        check_finite=not options.no_check_finite,
    )
    with Source(options.dst) as source:
        print(_summary(source))
    return 0


def parse_format(text: str) -> Format | None:
    """`nf4`, `nf4:block_size=32`, or `none`."""
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
        about = about_arrays(report, nested(contents.described))
        print(_summary(source))
        for key, value in source.metadata.items():
            print(f"{key}: {value}")
    # Why an array was left alone only its layer can tell.
    rows = [
        row if row.format else dataclasses.replace(row, reason="") for row in about.rows
    ]
    print()
    print(Report(tuple(rows)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    with Source(options.file) as source:
        contents = Contents(source, (), "verify")
        for path in contents.described:
            contents.read(path)
        checked = "checksums match" if source.is_ours else "without checksums"
        print(f"{_summary(source)}; whole; {checked}")
    return 0


def _summary(source: Source) -> str:
    files = len(source.files)
    size = sum(file.file_size for file in source.files)
    in_files = "1 file" if files == 1 else f"{files} files"
    return f"{source.path}: {len(source.tensors)} tensors, {size:,} bytes in {in_files}"
