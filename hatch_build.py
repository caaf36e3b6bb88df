"""Builds the native kernels into the wheel, or, without a compiler, none.

Environment variables select a wheel for another machine:

    EQQUANT_WHEEL=aarch64 CXX=aarch64-linux-gnu-g++ python -m build --wheel
    EQQUANT_WHEEL=any python -m build --wheel  # Pure Python, without native kernels.
"""

import importlib.util
import os
import pathlib
import sysconfig

from hatchling.builders.hooks.plugin.interface import (  # pyright: ignore
    BuildHookInterface,
)


def _load_build():
    # By its path: importing the package would need all that it needs.
    path = pathlib.Path(__file__).parent / "eqquant/kernels/cpu/_build.py"
    spec = importlib.util.spec_from_file_location("_build", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NativeKernels(BuildHookInterface):
    def initialize(self, version, build_data):
        native = _load_build()
        machine = os.environ.get("EQQUANT_WHEEL")
        if machine == "any":
            native.library.unlink(missing_ok=True)
            return
        cross = None
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        if machine:
            if native.architecture(machine) is None:
                raise SystemExit(
                    f"EQQUANT_WHEEL must be aarch64, x86_64 or any, got {machine!r}"
                )
            cross = os.environ["CXX"], native.architecture(machine)
            platform = f"linux_{machine}"
        try:
            # pip shows this with -v only: it keeps all output of a build to itself.
            library = native.build(say=self.app.display_waiting, cross=cross)
        except native.CannotBuild as problem:
            if machine:
                raise
            native.library.unlink(missing_ok=True)
            self.app.display_warning(
                f"eqquant is installed without native kernels: {problem}"
            )
            return
        # A plain C library: for any Python, but one platform.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append("/" + str(library.relative_to(self.root)))
