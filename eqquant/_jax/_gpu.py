"""Ahead-of-time compilation for NVIDIA GPUs on a machine without one.

XLA's compiler comes with JAX's CUDA plugin, and accepts a description of the chip.
Tried on JAX 0.10.2 with the plugin for CUDA 13.
"""

import dataclasses
import importlib.util

import jax
from jax.experimental import topologies


@dataclasses.dataclass(frozen=True)
class GPU:
    """The properties of a chip, for the compiler and for estimates.

    **Fields:**

    - `name`: the device kind.
    - `architecture`: the target of `ptxas`.
    - `cores`: streaming multiprocessors.
    - `bandwidth`: of device memory, in bytes per second.
    - `clock`: the boost clock, in cycles per second.
    - `lanes`: float32 multiply-add units per SM.
    - `memory`: device memory, in bytes.
    - `cache`: L2 cache, in bytes.
    - `shared`: shared memory per SM, in bytes. A thread block can use 1 KiB less.
    - `registers`: 32-bit registers per SM.
    - `threads`: the largest number of resident threads per SM.
    """

    name: str
    architecture: str
    cores: int
    bandwidth: float
    clock: float
    lanes: int
    memory: int
    cache: int
    shared: int
    registers: int = 65536
    threads: int = 2048


gpus = {
    "a100": GPU(
        "NVIDIA A100-SXM4-80GB",
        "sm_80",
        cores=108,
        bandwidth=2.039e12,
        clock=1.41e9,
        lanes=64,
        memory=84_900_000_000,
        cache=41_943_040,
        shared=167_936,
    ),
    "rtx4090": GPU(
        "NVIDIA GeForce RTX 4090",
        "sm_89",
        cores=128,
        bandwidth=1.008e12,
        clock=2.52e9,
        lanes=128,
        memory=25_250_000_000,
        cache=75_497_472,
        shared=102_400,
        threads=1536,
    ),
    "h100": GPU(
        "NVIDIA H100 80GB HBM3",
        "sm_90a",
        cores=132,
        bandwidth=3.35232e12,
        clock=1.98e9,
        lanes=128,
        memory=84_929_347_584,
        cache=52_428_800,
        shared=233_472,
    ),
    "h200": GPU(
        "NVIDIA H200",
        "sm_90a",
        cores=132,
        bandwidth=4.8e12,
        clock=1.98e9,
        lanes=128,
        memory=150_000_000_000,
        cache=62_914_560,
        shared=233_472,
    ),
}


def _target_config(gpu: GPU) -> str:
    """Describe a chip in the text format of XLA's `GpuTargetConfigProto`."""
    digits = gpu.architecture.removeprefix("sm_").rstrip("a")
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared}
  threads_per_core_limit: {gpu.threads}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu.bandwidth)}
  l2_cache_size: {gpu.cache}
  clock_rate_ghz: {gpu.clock / 1e9}
  device_memory_size: {gpu.memory}
  shared_memory_per_block_optin: {gpu.shared - 1024}
  cuda_compute_capability {{ major: {digits[:-1]} minor: {digits[-1]} }}
  registers_per_core_limit: {gpu.registers}
  registers_per_block_limit: {gpu.registers}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{gpu.name}"
"""


def has_gpu_compiler() -> bool:
    """Return whether JAX's CUDA plugin is installed. It needs no GPU."""
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    return any(importlib.util.find_spec(name) is not None for name in plugins)


def gpu_device(chip: str):
    """Return an abstract device: programs can be compiled for it, but not run."""
    jax.devices()  # Loads the plugins.
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_target_config(gpus[chip]), topology="1x1x1"
    )
    return topology.devices[0]
