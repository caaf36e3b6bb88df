"""Builds the native kernels into the wheel, or, without a compiler, none."""

import importlib.util
import pathlib
import sysconfig

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def _load_build():
    # By its path: importing the package would need all that it needs.
    path = pathlib.Path(__file__).parent / "eqquant/kernels/cpu/_build.py"
    spec = importlib.util.spec_from_file_location("_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NativeKernels(BuildHookInterface):
    def initialize(self, version, build_data):
        native = _load_build()
        try:
            # pip shows this with -v only: it keeps all output of a build to itself.
            library = native.build(say=self.app.display_waiting)
        except native.CannotBuild as problem:
            native.library.unlink(missing_ok=True)
            self.app.display_warning(
                f"eqquant is installed without native kernels: {problem}"
            )
            return
        # A plain C library: for any Python, but one platform.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append("/" + str(library.relative_to(self.root)))
