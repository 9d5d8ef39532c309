"""What torch and MLX, where installed, and ggml, where a library is given, make of the same products on a CPU."""

import ctypes
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from bench import timing
from bench.measure import Measured, Setup, relative_error

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_GROUP = 128
_F32 = 0  # ggml's numbers of types
_GGML_TYPES = {"Q4_0": 2, "Q4_K": 12}
# Format -> arguments of MLX's `quantize`.
_MLX_MODES = {
    "int4 g128": {"mode": "affine", "group_size": 128, "bits": 4},
    "mxfp4": {"mode": "mxfp4", "group_size": 32, "bits": 4},
    "nvfp4": {"mode": "nvfp4", "group_size": 16, "bits": 4},
    "mxfp8": {"mode": "mxfp8", "group_size": 32, "bits": 8},
}


class HostSystem(NamedTuple):
    name: str
    format: str
    dtypes: dict[str, tuple[str, ...]]  # of x, as in systems.System
    # (x, float32 (N, K) weight, bytes of a copy -> how many, dtype of x)
    # -> bytes of a copy, how many, what multiplies with all, the last y, the float32 weight that a copy stands for
    make: Callable


def measure(
    system: HostSystem, n: int, k: int, dtype: str, rows: list[int], setup: Setup
) -> Iterator[Measured]:
    """One measurement for each number of rows of x."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((n, k), np.float32)
    xs = rng.standard_normal((max(rows), k), np.float32)
    for m in rows:
        weight_bytes, copies, run, y, dense = system.make(xs[:m], weight, setup.plan.copies, dtype)
        run()
        times, deadline = [], time.perf_counter() + 3
        while len(times) < 3 or (len(times) < setup.plan.repeats and time.perf_counter() < deadline):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        sample = timing.Sample(1e6 * statistics.median(times) / copies, timing.spread(times), None, copies)
        x_bytes = (m * k + m * n) * (2 if dtype == "bfloat16" else 4)
        yield Measured(m, weight_bytes + x_bytes, sample, None, relative_error(y(), xs[:m] @ dense.T))


def systems(ggml: str | None) -> tuple[HostSystem, ...]:
    found = []
    if importlib.util.find_spec("torch"):
        found.append(HostSystem("torch", "int4 g128", {"cpu": ("bfloat16", "float32")}, _int4pack))
    if importlib.util.find_spec("mlx"):
        for name, mode in _MLX_MODES.items():
            found.append(HostSystem("mlx", name, {"cpu": ("float32",)}, partial(_mlx, mode)))
    if ggml:
        library = _load_ggml(ggml)
        for name, number in _GGML_TYPES.items():
            make = _ggml(library, number)
            found.append(HostSystem("ggml", f"int4 {name}", {"cpu": ("float32",)}, make))
    return tuple(found)


def _int4pack(x, weight, copies_of, dtype: str):
    import torch

    torch.set_num_threads(THREADS)
    n, k = weight.shape
    kind = getattr(torch, dtype)
    groups = torch.from_numpy(weight).view(n, k // _GROUP, _GROUP)
    scale = ((groups.amax(-1) - groups.amin(-1)) / 15).to(kind)
    shift = (groups.amin(-1) + 8 * scale.float()).to(kind)  # w = (code - 8) * scale + shift
    codes = ((groups - shift.float()[..., None]) / scale.float()[..., None] + 8).round().clamp(0, 15)
    dense = ((codes - 8) * scale.float()[..., None] + shift.float()[..., None]).view(n, k).numpy()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.view(n, k).int(), 1)
    params = torch.stack([scale, shift], -1).transpose(0, 1).contiguous()
    nbytes = sum(t.numel() * t.element_size() for t in (packed, params))
    weights = [(packed.clone(), params.clone()) for _ in range(copies_of(nbytes))]
    x = torch.from_numpy(x).to(kind)
    ys = []

    def run():
        ys[:] = [torch.ops.aten._weight_int4pack_mm_for_cpu(x, w, _GROUP, p) for w, p in weights]

    return nbytes, len(weights), run, lambda: ys[-1].float().numpy(), dense


def _mlx(mode: dict, x, weight, copies_of, dtype: str):
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    arrays = mx.quantize(mx.array(weight), **mode)
    nbytes = sum(a.nbytes for a in arrays)
    weights = [[mx.array(np.array(a)) for a in arrays] for _ in range(copies_of(nbytes))]
    dense = np.array(mx.dequantize(*arrays, **mode).astype(mx.float32))
    x, ys = mx.array(x), []

    def run():
        ys[:] = [mx.quantized_matmul(x, *w, **mode) for w in weights]
        mx.eval(ys)

    return nbytes, len(weights), run, lambda: np.array(ys[-1]), dense


@cache
def _load_ggml(path: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise SystemExit(f"bench: --ggml: {error}") from None
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    for name, result, *arguments in (
        ("init", pointer, _Init),
        ("free", None, pointer),
        ("new_tensor_2d", pointer, pointer, ctypes.c_int, long, long),
        ("get_data", pointer, pointer),
        ("nbytes", ctypes.c_size_t, pointer),
        ("tensor_overhead", ctypes.c_size_t),
        ("graph_overhead", ctypes.c_size_t),
        ("mul_mat", pointer, pointer, pointer, pointer),
        ("new_graph", pointer, pointer),
        ("build_forward_expand", None, pointer, pointer),
        ("quantize_chunk", ctypes.c_size_t, ctypes.c_int, pointer, pointer, long, long, long, pointer),
        ("row_size", ctypes.c_size_t, ctypes.c_int, long),
        ("get_type_traits", ctypes.POINTER(_Traits), ctypes.c_int),
        ("backend_cpu_init", pointer),
        ("backend_cpu_set_n_threads", None, pointer, ctypes.c_int),
        ("backend_graph_compute", ctypes.c_int, pointer, pointer),
    ):
        function = getattr(library, f"ggml_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class _Init(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Traits(ctypes.Structure):
    """The beginning of ggml_type_traits."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def _ggml(library: ctypes.CDLL, number: int):
    """All products in one graph of ggml's."""

    def make(x, weight, copies_of, dtype: str):
        m, (n, k) = x.shape[0], weight.shape
        nbytes = library.ggml_row_size(number, k) * n
        copies = copies_of(nbytes)
        room = 4 * (copies + 8) * library.ggml_tensor_overhead() + library.ggml_graph_overhead()
        context = library.ggml_init(
            _Init(copies * (nbytes + 4 * m * n + 128) + 4 * m * k + room, None, False)
        )
        quantized = np.empty(nbytes, np.uint8)
        library.ggml_quantize_chunk(number, weight.ctypes.data, quantized.ctypes.data, 0, n, k, None)
        dense = np.empty_like(weight)
        library.ggml_get_type_traits(number).contents.to_float(
            quantized.ctypes.data, dense.ctypes.data, n * k
        )
        operand = library.ggml_new_tensor_2d(context, _F32, k, m)
        ctypes.memmove(library.ggml_get_data(operand), np.ascontiguousarray(x).ctypes.data, 4 * m * k)
        graph = library.ggml_new_graph(context)
        for _ in range(copies):
            w = library.ggml_new_tensor_2d(context, number, k, n)
            ctypes.memmove(library.ggml_get_data(w), quantized.ctypes.data, nbytes)
            product = library.ggml_mul_mat(context, w, operand)
            library.ggml_build_forward_expand(graph, product)
        backend = library.ggml_backend_cpu_init()
        library.ggml_backend_cpu_set_n_threads(backend, THREADS)

        def run():
            if library.ggml_backend_graph_compute(backend, graph):
                raise RuntimeError("ggml could not compute the graph")

        def y():
            at = ctypes.cast(library.ggml_get_data(product), ctypes.POINTER(ctypes.c_float))
            result = np.ctypeslib.as_array(at, (m, n)).copy()
            library.ggml_free(context)
            return result

        return nbytes, copies, run, y, dense

    return make
