"""Mutation testing: every small change to the source should make a test fail.

`make mutants` draws 200 mutants. It prints the share of killed mutants that the fast
tests kill, and the surviving mutants. The tests that execute the changed line run
against each mutant: first the fast tests, then the slow ones.

Results are in build/mutants/, in a folder for each state of sources and tests. An
interrupted run resumes. List a surviving mutant that does not change behaviour in
no_change.toml, with the reason.
"""

import argparse
import concurrent.futures
import hashlib
import itertools
import json
import os
import pathlib
import queue
import shutil
import sys
import time
import tomllib

from making import draw, Mutant
from testing import killer, read_json_lines, record, Suite


ROOT = pathlib.Path(__file__).parent.parent.parent
ENOUGH = 0.9  # The share of killed mutants that the fast tests must kill.
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "site", "output", "__pycache__", ".*_cache"
)


def fingerprint(tests: list[str]) -> str:
    paths = [*(ROOT / "eqquant").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    paths = sorted(path for path in paths if path.parent.name != "mutants")
    parts = [repr(tests), *(f"{path}\n{path.read_text()}" for path in paths)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def identity(about: dict) -> tuple[str, str]:
    return about["file"], about["diff"]


def content(about: dict) -> tuple[str, str]:
    """Return the content of a mutant, which is independent of line numbers."""
    lines = [s for s in about["diff"].splitlines() if not s.startswith("@@")]
    return about["file"], "\n".join(lines)


_times = itertools.count(1)


def put(path: pathlib.Path, source: str) -> None:
    """Write a mutant with a unique modification time.

    Python identifies cached bytecode by the modification second and the size of its
    source.
    """
    path.write_text(source)
    os.utime(path, (next(_times),) * 2)


def within(tests: list[dict], seconds: float) -> list[dict]:
    """Return the first tests within a total duration, but at least five."""
    ends = itertools.accumulate(test["seconds"] for test in tests)
    count = sum(end <= seconds for end in ends)
    return tests[: max(count, 5)]


def try_one(mutant: Mutant, suite: Suite, copy: pathlib.Path, patience: float) -> dict:
    start = time.monotonic()
    name = mutant.about["file"]
    tests = suite.noticing(ROOT / name, name, mutant.about["line"])
    tests = within(tests, patience)
    put(copy / name, mutant.source)
    by_fast = killer([test for test in tests if not test["slow"]], copy)
    by_slow = None
    if by_fast is None:
        by_slow = killer([test for test in tests if test["slow"]], copy)
    put(copy / name, (ROOT / name).read_text())
    return mutant.about | {
        "killed": "fast" if by_fast else "slow" if by_slow else "no",
        "by": by_fast or by_slow,
        "tests": len(tests),
        "seconds": round(time.monotonic() - start, 1),
    }


def try_all(
    mutants: list[Mutant],
    suite: Suite,
    copies: list,
    path: pathlib.Path,
    patience: float,
):
    """Yield results as they arrive, and append each to the file."""
    free = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def try_in_free_copy(mutant: Mutant) -> dict:
        copy = free.get()
        try:
            return try_one(mutant, suite, copy, patience)
        finally:
            free.put(copy)

    pool = concurrent.futures.ThreadPoolExecutor(len(copies))
    try:
        tried = [pool.submit(try_in_free_copy, mutant) for mutant in mutants]
        for future in concurrent.futures.as_completed(tried):
            result = future.result()
            with path.open("a") as file:
                file.write(json.dumps(result) + "\n")
            yield result
    finally:
        pool.shutdown(cancel_futures=True)


def report(results: list[dict]) -> bool:
    """Print the results. Return whether the fast tests kill enough mutants, and each
    surviving mutant has a reason."""
    listed = (pathlib.Path(__file__).parent / "no_change.toml").read_text()
    reasons = {content(m): m["why"] for m in tomllib.loads(listed).get("mutant", ())}
    survivors = [result for result in results if result["killed"] == "no"]
    for result in survivors:
        reason = reasons.get(content(result), "no reason listed")
        print(f"\nSurvives {result['tests']} tests: {reason}")
        print(f"{result['file']}:{result['line']}, {result['operator']}")
        print(result["diff"])
    unexplained = sum(content(result) not in reasons for result in survivors)
    fast = sum(result["killed"] == "fast" for result in results)
    whole = len(results) - len(survivors)
    print(f"\n{len(results)} mutants; {unexplained} survive without a reason")
    print(f"killed by the whole suite: {whole}; by the fast tests: {fast}", end="")
    print(f", {fast / whole:.1%} of these" if whole else "")
    return not unexplained and fast >= ENOUGH * whole


def main() -> bool:
    parser = argparse.ArgumentParser(prog="mutants")
    parser.add_argument("paths", nargs="+", help="folders or files to change")
    parser.add_argument("--number", type=int, default=200, help="of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tests", nargs="+", default=["tests"], help="all by default")
    parser.add_argument("--survivors", help="of these earlier results (.jsonl), only")
    parser.add_argument(
        "--patience",
        type=float,
        default=float("inf"),
        help="seconds of tests for each mutant, by default of all that may notice it; "
        "one that outlives them survives",
    )
    args = parser.parse_args()

    paths = [(ROOT / path).resolve(strict=True) for path in args.paths]
    files = sorted(f for p in paths for f in ([p] if p.is_file() else p.rglob("*.py")))
    mutants = list(itertools.islice(draw(files, ROOT, args.seed), args.number))
    if args.survivors:
        earlier = read_json_lines(pathlib.Path(args.survivors))
        alive = {content(each) for each in earlier if each["killed"] == "no"}
        mutants = [mutant for mutant in mutants if content(mutant.about) in alive]

    folder = ROOT / "build" / "mutants" / fingerprint(args.tests)
    copies = [folder / f"copy{i}" for i in range(args.workers)]
    for copy in copies:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    if not (folder / "tests.jsonl").exists():
        record(copies[0], args.tests, args.workers)

    path = folder / "results.jsonl"
    path.touch()
    results = {identity(result): result for result in read_json_lines(path)}
    left = [mutant for mutant in mutants if identity(mutant.about) not in results]
    for result in try_all(left, Suite(folder), copies, path, args.patience):
        results[identity(result)] = result
        print(f"{result['file']}:{result['line']} {result['operator']}:", end=" ")
        print(result["killed"], result["by"] or "", flush=True)
    return report([results[identity(mutant.about)] for mutant in mutants])


if __name__ == "__main__":
    sys.exit(not main())
