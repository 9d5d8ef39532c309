"""Eight NVIDIA H200s that are not there: XLA compiles for them on any machine, given JAX's CUDA plugin."""

import importlib.util
import os

import pytest
from jax.experimental import topologies

from jaxgemv._ffi import backends

# What XLA's GPU compiler wants to know of a device, in its own terms (GpuTargetConfigProto).
TARGET_CONFIG = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 }
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.0.0"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
  device_address_bits: 64
  ecc_enabled: true
}
"""

# There is no device on which to try variants of a kernel.
COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0}


def devices() -> list:
    """Skips the test where they cannot be had, or fails it with JAXGEMV_REQUIRE_H200=1."""
    reason = backends["cuda"].missing and f"jaxgemv._cuda is {backends['cuda'].missing}"
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        reason = "jax-cuda13-plugin and jax-cuda13-pjrt are not installed"
    try:
        if not reason:
            return topologies.get_topology_desc(
                platform="cuda", target_config=TARGET_CONFIG, topology="1x1x8"
            ).devices
    except NotImplementedError:  # without a GPU JAX loads the plugin only if told not to use it
        reason = "JAX's CUDA plugin did not load; without a GPU that takes JAX_PLATFORMS=cpu and jax 0.10"
    stop = pytest.fail if os.environ.get("JAXGEMV_REQUIRE_H200") == "1" else pytest.skip
    stop(f"h200: {reason}")
