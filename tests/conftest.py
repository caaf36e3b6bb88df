"""Setup of every test process.

`pytest -n 2` starts three processes. The controller runs no tests, so it imports
neither JAX nor eqquant, and its workers start sooner. Workers load `shared.py`.
"""

import os


os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Set once: workers inherit the variable, and the keys of JAX's cache contain the flags.
# Programs of tests are small, and splitting them into parts takes time.
for flag in (
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_parallel_codegen_split_count=1",
):
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " " + flag


def pytest_configure(config):
    distributed = config.getoption("dist", "no") != "no"
    is_worker = hasattr(config, "workerinput")
    if is_worker or not distributed or config.option.collectonly:
        check_types(config)
        config.pluginmanager.import_plugin("shared")


def check_types(config):
    """Check the types of all functions at run time, except in `make test`.

    These checks take a tenth of the time. Public functions are checked in any case.
    """
    if config.option.markexpr != "not slow":
        import type_checks

        type_checks.install()
