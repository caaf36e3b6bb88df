"""What every process sets up, and that all but one of them load the rest.

    pytest -n 2

starts three processes. The one that hands out the tests runs none, so it imports
neither JAX nor eqquant, and its workers start that much sooner.
"""

import os


os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Once: workers have it of the process that started them, and JAX finds a program that
# it has kept by these flags, too.
flag = "--xla_force_host_platform_device_count=8"
if flag not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " " + flag


def pytest_configure(config):
    distributed = config.getoption("dist", "no") != "no"
    is_worker = hasattr(config, "workerinput")
    if is_worker or not distributed or config.option.collectonly:
        config.pluginmanager.import_plugin("shared")
