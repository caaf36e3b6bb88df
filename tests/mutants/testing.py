"""Test runs in a copy of the checkout: recorded lines per test, and failing tests."""

import ast
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys

import coverage


MEMORY = 12 << 30  # The limit on mapped memory of a test run, in bytes.


def read_json_lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _run(command: list, copy: pathlib.Path, limit: int | None, **env: str):
    """Return the exit status and the output of a command.

    The status is None after `limit` seconds of CPU time, which other programs do not
    affect, or after a multiple of `limit` in wall time.
    """
    ours = {"PYTHONPATH": str(copy)}
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=copy,
        env=os.environ | ours | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    if hasattr(resource, "prlimit"):  # Linux only.
        resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY, MEMORY))
        if limit:
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit, limit))
    try:
        output, _ = process.communicate(timeout=limit and 10 * limit)
        spent = process.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
        return None if spent else process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def killer(tests: list[dict], copy: pathlib.Path) -> str | None:
    """Return the first failing test or another problem; None if all tests pass."""
    if not tests:
        return None
    # All tests would exceed the length of a command line.
    listed = copy.with_suffix(".tests")
    listed.write_text("".join(test["test"] + "\n" for test in tests))
    seconds = [test["seconds"] for test in tests]
    options = [
        *("-x", "-q", "--tb=no", "--no-header", "-p", "no:cacheprovider"),
        *("-o", f"faulthandler_timeout={600 + 20 * max(seconds)}"),
        *("-o", "faulthandler_exit_on_timeout=true"),
        f"--basetemp={copy.with_suffix('.tmp')}",
    ]
    limit = int(180 + 4 * sum(seconds))
    status, output = _run(["pytest", *options, f"@{listed}"], copy, limit)
    if status == 0:
        return None
    if status is None or "Timeout (" in output:
        return "timeout"
    lines = output.splitlines()
    failed = (line for line in lines if line.startswith(("FAILED ", "ERROR ")))
    return next(failed, " ".join(lines[-1:]))[:200] or f"exit status {status}"


def record(copy: pathlib.Path, tests: list[str], workers: int) -> None:
    """Record the lines of each test next to the copy. Every test must pass."""
    settings = copy.with_name("coverage.ini")
    settings.write_text(
        "[run]\nsource_pkgs = eqquant\nrelative_files = true\npatch = subprocess\n"
        f"data_file = {copy.with_name('lines')}\n"
    )
    listed = copy.with_name("tests.unchecked")
    listed.unlink(missing_ok=True)
    command = ["coverage", "run", f"--rcfile={settings}", "-m", "pytest", *tests]
    status, output = _run(
        [*command, "-q", "-p", "contexts", "-n", str(workers), "--dist", "worksteal"],
        copy,
        limit=None,
        PYTHONPATH=f"{copy}{os.pathsep}{pathlib.Path(__file__).parent}",
        TESTS_FILE=str(listed),
    )
    if status != 0:
        raise SystemExit(f"The tests must pass before anything is changed.\n{output}")
    _run(["coverage", "combine", f"--rcfile={settings}"], copy, limit=None)
    # Run the tests in one process, because sharing a process could also kill mutants.
    fast = [test for test in read_json_lines(listed) if not test["slow"]]
    if failed := killer(fast, copy):
        raise SystemExit(f"The fast tests must pass in one process: {failed}")
    listed.rename(copy.with_name("tests.jsonl"))


def _statement(source: str, line: int) -> range:
    """Return the lines of the statement that contains `line`, without its body."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            decorators = getattr(node, "decorator_list", [])
            body = getattr(node, "body", None)
            first = min(each.lineno for each in [node, *decorators])
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
            if first <= line <= last:
                found = range(first, last + 1)
    return found


class Suite:
    """The recorded lines of each test."""

    def __init__(self, folder: pathlib.Path):
        tests = read_json_lines(folder / "tests.jsonl")
        self.tests = {test["test"]: test for test in tests}
        self.data = coverage.CoverageData(str(folder / "lines"))
        self.data.read()

    def noticing(self, file: pathlib.Path, name: str, line: int) -> list[dict]:
        """Return the tests that may detect a change.

        These execute the statement. If it runs on import, all tests qualify. Tests of
        the same folder come first, then other tests that execute the file; fast tests
        first.
        """
        by_line = self.data.contexts_by_lineno(name)
        lines = _statement(file.read_text(), line)
        running = {test for line in lines for test in by_line.get(line, ())}
        names = self.tests if "" in running else running & self.tests.keys()
        in_file = {test for tests in by_line.values() for test in tests}
        room = "/".join(("tests", *name.split("/")[1:2]))

        def order(name: str):
            elsewhere = not name.startswith(f"{room}/")
            return name not in in_file, elsewhere, self.tests[name]["seconds"]

        return [self.tests[name] for name in sorted(names, key=order)]
