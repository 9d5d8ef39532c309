"""What torch, gemlite and bitsandbytes make of the same products, where they are installed: in captured graphs, as
jaxgemv's kernels.

torch must see a CUDA device. What it takes of the memory is what JAX leaves to it: see bench/__main__.py.
"""

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.measure import Measured, Setup, relative_error
from jaxgemv.codebooks import E2M1

_GROUP = 128


class TorchSystem(NamedTuple):
    name: str
    format: str
    dtypes: dict[str, tuple[str, ...]]  # of x, as in systems.System
    make: Callable  # (n, k) -> tensors of one copy of the weight, (x, tensors) -> y, the float32 (N, K) it stands for


def installed(system: TorchSystem, platform: str) -> bool:
    if platform not in system.dtypes or not all(map(importlib.util.find_spec, {"torch", system.name})):
        return False
    import torch

    return torch.cuda.is_available()


def measure(
    system: TorchSystem, n: int, k: int, dtype: str, rows: list[int], setup: Setup
) -> Iterator[Measured]:
    """One measurement for each number of rows of x, all with the same weights."""
    import torch

    with torch.inference_mode(), torch.device("cuda"):
        torch.manual_seed(0)
        tensors, product, dense = system.make(n, k)
        weight_bytes = sum(t.numel() * t.element_size() for t in tensors)
        copies = [[t.clone() for t in tensors] for _ in range(setup.plan.copies(weight_bytes))]
        weights = setup.plan.sequence(copies)
        xs = torch.randn(max(rows), k, dtype=getattr(torch, dtype))
        expected = (xs.float() @ dense.T).cpu().numpy()
        del tensors, dense
        for m in rows:
            x = xs[:m].contiguous()
            y, us = _graph(product, x, weights, setup.plan.repeats)
            yield Measured(
                rows=m,
                nbytes=weight_bytes + (x.numel() + y.numel()) * x.element_size(),
                sample=None,
                kernel_us=us,
                error=relative_error(y.float().cpu().numpy(), expected[:m]),
            )


def _graph(product, x, weights, repeats: int):
    """(the last y, microseconds of one product), as time_graph in graph.h takes them."""
    import torch

    scratch = torch.zeros(1 << 27)  # reading it empties the L2, and takes longer than launching the graph
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for w in weights[:3]:  # tunes, and loads what a capture must not load
            y = product(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX has threads of its own
        for w in weights:
            y = product(x, w)
    times = []
    for repeat in range(-2, repeats):
        scratch.sum()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if repeat >= 0:
            times.append(1e3 * start.elapsed_time(stop) / len(weights))
    return y, statistics.median(times)


def _linear(n: int, k: int):
    import torch

    w = torch.randn(n, k, dtype=torch.float16)
    return [w], lambda x, tensors: torch.nn.functional.linear(x, *tensors), w.float()


def _codes(n: int, k: int):
    """Random 4-bit codes, one a byte, and a scale and a zero for each group."""
    import torch

    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scale = (torch.rand(n, k // _GROUP) + 0.5) / 16
    zero = torch.randint(0, 16, (n, k // _GROUP)).float()
    return codes, scale, zero


def _dense(codes, scale, zero):
    groups = codes.view(*scale.shape, _GROUP).float()
    return ((groups - zero[..., None].float()) * scale[..., None].float()).view(codes.shape)


def _int4pack(n: int, k: int):
    import torch

    codes, scale, zero = _codes(n, k)
    # It stores w = (code - 8) * scale + shift, in bfloat16.
    scale = scale.bfloat16()
    shift = ((8 - zero) * scale.float()).bfloat16()
    packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    params = torch.stack([scale, shift], -1).transpose(0, 1).contiguous()

    def product(x, tensors):
        return torch.ops.aten._weight_int4pack_mm(x, tensors[0], _GROUP, tensors[1])

    return [packed, params], product, _dense(codes, scale, 8 - shift.float() / scale.float())


def _of_gemlite(layer):
    """(tensors of a layer, what multiplies with those of its copies)"""
    import gemlite
    import torch

    if torch.cuda.get_device_capability() == (9, 0):
        # It knows the best settings of an H100, and finds them by that name only; others it tunes for minutes.
        gemlite.load_config(str(Path(gemlite.__file__).parent / "configs/h100.json"))
    meta = layer.get_meta_args()

    def product(x, tensors):
        return gemlite.forward_functional(x, None, tensors, meta)

    return layer.get_tensor_args(), product


def _gemlite(n: int, k: int):
    import gemlite

    codes, scale, zero = _codes(n, k)
    scale, zero = scale.half(), zero.half()
    half = gemlite.DType.FP16
    layer = gemlite.GemLiteLinear(4, _GROUP, k, n, input_dtype=half, output_dtype=half)
    layer.pack(codes, scale, zero)
    return *_of_gemlite(layer), _dense(codes, scale, zero)


def _gemlite_fp4(n: int, k: int, *, kind: str, group: int, scale_dtype: str):
    """Random entries of E2M1, and scales near 1."""
    import torch
    from gemlite import helper

    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scale = (torch.rand(n, k // group) + 0.5).to(getattr(torch, scale_dtype))
    layer = getattr(helper, kind)(dtype=torch.bfloat16).from_weights(codes, scales=scale)
    values = torch.from_numpy(E2M1).to(codes.device)[codes.int()].view(n, -1, group)
    return *_of_gemlite(layer), (values * scale.float()[..., None]).view(n, k)


def _bitsandbytes(n: int, k: int):
    import bitsandbytes
    import torch
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(torch.randn(n, k, dtype=torch.bfloat16), quant_type="nf4")
    rest = {name: getattr(state, name) for name in ("shape", "code", "blocksize", "quant_type", "dtype")}

    def product(x, tensors):
        packed, absmax = tensors
        return bitsandbytes.matmul_4bit(x, packed, functional.QuantState(absmax, **rest))

    return [packed, state.absmax], product, functional.dequantize_4bit(packed, state).float()


SYSTEMS = (
    TorchSystem("torch", "f16", {"gpu": ("float16",)}, _linear),
    TorchSystem("torch", "int4 g128", {"gpu": ("bfloat16",)}, _int4pack),
    TorchSystem("gemlite", "int4 g128", {"gpu": ("float16",)}, _gemlite),
    TorchSystem(
        "gemlite",
        "mxfp4",
        {"gpu": ("bfloat16",)},
        partial(_gemlite_fp4, kind="A16W4_MXFP", group=32, scale_dtype="float8_e8m0fnu"),
    ),
    TorchSystem(
        "gemlite",
        "nvfp4",
        {"gpu": ("bfloat16",)},
        partial(_gemlite_fp4, kind="A16W4_NVFP", group=16, scale_dtype="float8_e4m3fn"),
    ),
    TorchSystem("bitsandbytes", "nf4", {"gpu": ("bfloat16",)}, _bitsandbytes),
)
