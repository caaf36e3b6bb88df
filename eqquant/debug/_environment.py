"""The environment of a bug report."""

import importlib.metadata
import pathlib
import platform
import sys

import jax

from .._jax import typed
from ..kernels import cpu


_packages = ("eqquant", "jax", "jaxlib", "equinox", "jaxtyping", "beartype", "numpy")
_features = ("avx2", "avx512f", "avx512_vnni", "amx_int8", "asimddp", "i8mm", "neon")


@typed
def environment() -> str:
    """Describe the versions, the processor, the kernels and the devices, for the report
    of a bug.

    !!! Example

        ```python
        import eqquant

        print(eqquant.debug.environment())
        ```

    **Returns:**

    One line for each of: the versions of eqquant and its dependencies, Python, the
    operating system, the processor and its vector instructions, the native kernels, the
    devices of JAX, and settings of JAX that change results. It has no names of users or
    hosts.
    """
    settings = ("jax_enable_x64", "jax_default_matmul_precision")
    devices = [f"{d.platform}: {d.device_kind}" for d in jax.devices()]
    counts = {name: devices.count(name) for name in devices}
    rows = {
        **{name: _version(name) for name in _packages},
        "Python": f"{sys.version.split()[0]} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.machine()}",
        "CPU": ", ".join(_cpu()) or "unknown",
        "kernels": cpu.status(),
        "devices": ", ".join(f"{n} x {name}" for name, n in counts.items()),
        **{name: str(getattr(jax.config, name)) for name in settings},
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> list[str]:
    """Return the model of the processor and its features, where Linux lists them."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return [platform.processor()] if platform.processor() else []
    fields = dict(
        (key.strip(), value.strip())
        for key, _, value in (line.partition(":") for line in text.splitlines())
    )
    names = fields.get("flags", fields.get("Features", "")).split()
    found = [feature for feature in _features if feature in names]
    return [fields[key] for key in ("model name",) if key in fields] + found
