"""scikit-build-core, which also fetches a CUDA compiler where one is asked for and missing."""

import os

import scikit_build_core.build as _build
from find_nvcc import find_nvcc
from scikit_build_core.build import *  # noqa: F403  the hooks that need no change

# 13.0 and not the newest: a driver cannot compile the PTX of a CUDA newer than itself.
CUDA_COMPILER = [
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
]


def _cuda_compiler() -> list[str]:
    wanted = os.environ.get("JAXGEMV_CUDA") == "ON"
    return CUDA_COMPILER if wanted and find_nvcc() is None else []


def get_requires_for_build_wheel(config_settings=None):
    return _build.get_requires_for_build_wheel(config_settings) + _cuda_compiler()


def get_requires_for_build_editable(config_settings=None):
    return _build.get_requires_for_build_editable(config_settings) + _cuda_compiler()
