"""XLA's record stage (csrc/cuda/record.cc): calls that are nodes of its CUDA graphs."""

import dataclasses
import importlib
import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from kernels import on, transposed

from jaxgemv import QuantizedTensor, gemv, quantize
from jaxgemv import _ffi as ffi

HEADERS = Path(jaxlib.__file__).parent / "include"
ABI = Path(__file__).parent.parent / "csrc/cuda/record_abi.h"
# Ours and XLA's, field by field: of another name behind "=".
SAME = {
    "Extension XLA_FFI_Extension": "struct_size type=id.extension_type major=id.major_version minor=id.minor_version",
    "FindExtension XLA_FFI_InvokeContext_FindExtension_Args": "context=ctx type=extension_type found=extension",
    "Span XLA_FFI_ByteSpan": "data=ptr size=len",
    "Bundle XLA_FFI_Handler_Bundle": "instantiate prepare initialize execute record",
    "Register XLA_FFI_Handler_Register_Args": "extension_start name platform bundle traits",
    "Dim3 XLA_FFI_Dim3": "x y z",
    "LaunchDims XLA_FFI_LaunchDims": "grid block cluster",
    "KernelArg XLA_FFI_KernelArg": "data=arg_address size type",
    "KernelArgs XLA_FFI_KernelArgs": "args count=num_args",
    "Api XLA_FFI_RecordApi": "create_launch update_launch request_capture=request_stream_capture",
    "Frame XLA_FFI_RecordFrame": "context=record_ctx api action commands count=num_commands most=max_commands",
    "RecordExtension XLA_FFI_Record_Extension": "base=extension_base frame=record_frame",
}
VALUES = {
    "kType": "XLA_FFI_Extension_Record",
    "kStage": "XLA_FFI_ExecutionStage_RECORD",
    "kCreate": "XLA_FFI_RecordAction_Create",
    "kCubin": "XLA_FFI_SourceFormat_CUBIN",
    "kHostValue": "XLA_FFI_KernelArgType_HostValue",
    "kFindExtensionAt": "offsetof(XLA_FFI_Api, XLA_FFI_InvokeContext_FindExtension)",
}


class Built:
    """What the CUDA module says, also where it is not compiled."""

    RECORDS = tuple(
        tuple(map(int, version.split(", ")))
        for version in re.search(r"kVersions\[\] = {{(.*)}};", ABI.read_text())[1].split("}, {")
    )


ASKED = (  # of jaxlib's headers
    "XLA_FFI_API_MINOR",
    "XLA_FFI_Extension_Record_MajorVersion",
    "XLA_FFI_Extension_Record_MinorVersion",
)


def test_record_abi_is_that_of_the_header(tmp_path, monkeypatch):
    """Where jaxlib has a version that we know: every size, place and number."""
    monkeypatch.delenv("JAXGEMV_RECORD", raising=False)
    if not ffi._records(Built):
        pytest.skip("a jaxlib without the stage, or with one that is not known")
    asserts = [f"static_assert(abi::{ours} == {theirs});" for ours, theirs in VALUES.items()]
    for names, fields in SAME.items():
        ours, theirs = names.split()
        asserts.append(f"static_assert(sizeof(abi::{ours}) == sizeof({theirs}));")
        for field in fields.split():
            a, _, b = field.partition("=")
            asserts.append(f"static_assert(offsetof(abi::{ours}, {a}) == offsetof({theirs}, {b or a}));")
    source = tmp_path / "same.cc"
    source.write_text(
        f'#include "xla/ffi/api/record_c_api.h"\n#include "{ABI}"\n'
        "namespace abi = jaxgemv::cuda::record_abi;\n" + "\n".join(asserts)
    )
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    command = [compiler, "-std=c++20", "-Wno-invalid-offsetof", f"-I{HEADERS}", "-fsyntax-only", source]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("wish", [None, "0"])
def test_which_versions(wish, monkeypatch):
    monkeypatch.delenv("JAXGEMV_RECORD", raising=False)
    if wish:
        monkeypatch.setenv("JAXGEMV_RECORD", wish)
    answers = []
    for version in [*Built.RECORDS, (9, 0, 9), (None, None, None)]:
        header = dict(zip(ASKED, version, strict=True))
        monkeypatch.setattr(ffi, "_in_header", lambda file, name, header=header: header[name])
        answers.append(ffi._records(Built))
        assert not ffi._records(object())  # an extension for the CPU
    assert answers == [wish is None] * len(Built.RECORDS) + [False, False]


CALLS, K = 6, 1024  # from five on XLA makes a graph
NAMED = [
    *[("stream", rows) for rows in (1, 2, 8)],
    *[("direct", rows) for rows in (1, 16)],
    *[("mma_any", rows) for rows in (1, 32)],
    *[("wgmma", rows) for rows in (32, 64)],
    *[("wgmma_any", rows) for rows in (16, 64)],
    *[("wgmma_tma", rows) for rows in (16, 64)],
    *[("gemm", 128), ("gemm_tma", 128), ("fma", 2), ("simt", 3), ("transposed", 2)],
]
# Others are captured, or may be.
OF_ONE_KERNEL = {"stream", "direct", "wgmma", "gemm_tma", "fma", "simt", "transposed"}


def nodes() -> int:
    return importlib.import_module("jaxgemv._cuda").recorded()


def records() -> bool:
    return ffi._records(importlib.import_module("jaxgemv._cuda"))


def weights(i: int) -> QuantizedTensor:
    return quantize(jax.random.normal(jax.random.key(i), (K, K)) * K**-0.5, bits=4, group_size=128)


def written_behind(x, w: QuantizedTensor) -> QuantizedTensor:
    """w as it is, but that a kernel of XLA's writes its arrays when x is there."""
    nothing = jnp.where(x.ravel()[0] == 12345, 1, 0)
    packed, scale = (a + nothing.astype(a.dtype) for a in (w.packed, w.scale))
    return dataclasses.replace(w, packed=packed, scale=scale)


def product_of(name: str):
    if name == "transposed":
        return lambda x, w: transposed(x, w, K, "cuda", out=x.dtype)
    return lambda x, w: gemv(x, w, implementation="cuda")


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "rows"), NAMED)
@pytest.mark.parametrize("own", [lambda x, w: w, written_behind], ids=["as-it-is", "written"])
def test_each_call_waits_for_the_one_before(name, rows, own):
    """In a graph each may begin early; what it gives is what calls give that are made one by one."""
    product = product_of(name)

    @jax.jit
    def chain(x, ws):
        for w in ws:
            x = product(x, own(x, w))
        return x

    with on("cuda", name=name):
        x = jax.random.normal(jax.random.key(1), (rows, K), jnp.bfloat16)
        ws, alone = [weights(i) for i in range(CALLS)], jax.jit(product)
        expected = x
        for w in ws:
            expected = alone(expected, w)
        assert ffi.last_kernel("cuda") == name
        before = nodes()
        for _ in range(3):  # with other arrays, for which the graph is updated
            y = chain(*jax.tree.map(jnp.copy, (x, ws)))
            np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(expected, np.float32))
        assert nodes() - before >= (CALLS if records() and name in OF_ONE_KERNEL else 0)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "form", [{}, {"bits": 3}, {"format": "nf4"}, {"format": "nvfp4"}, {"format": "fp8"}], ids=str
)
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, "bfloat16"), (4, "float16"), (16, "bfloat16"), (2, "float32")]
)
def test_parts(form, rows, dtype):
    """Of a decoder's layers, out of stacks: behind a residual or an activation the next call begins earliest."""
    form = form if "format" in form else {"group_size": 128, "bits": 4} | form
    random = [jax.random.normal(jax.random.key(i), (3, 2 * K, K)) * K**-0.5 for i in range(2)]
    up, down = quantize(random[0], **form), quantize(random[1][:, :K], **form)
    norm = jnp.ones((3, K), dtype)

    def layer(x, i, up, down):
        y = gemv(x, up, index=i, norm=norm, activation="swiglu", implementation="cuda")
        return gemv(y, down, index=i, residual=x, implementation="cuda")

    @jax.jit
    def layers(x, up, down):
        for i in range(3):
            x = layer(x, i, up, down)
        return x

    with on("cuda"):
        x = jax.random.normal(jax.random.key(2), (rows, K), dtype)
        expected, alone = x, jax.jit(layer, static_argnums=1)
        for i in range(3):
            expected = alone(expected, i, up, down)
        expected = np.asarray(expected, np.float32)
        for _ in range(3):
            y = layers(*jax.tree.map(jnp.copy, (x, up, down)))
            # XLA's own parts may round otherwise in one program than in three.
            np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=2**-6 * np.abs(expected).max())


@pytest.mark.cuda
def test_loop():
    """In a loop the graph is part of another one."""
    with on("cuda"):
        x, w = jax.random.normal(jax.random.key(1), (1, K), jnp.bfloat16), weights(0)

        def calls(_, x):
            for _ in range(CALLS):
                x = gemv(x, w, implementation="cuda")
            return x

        y, alone = x, jax.jit(gemv)
        for _ in range(3 * CALLS):
            y = alone(y, w)
        looped = jax.jit(lambda x: jax.lax.fori_loop(0, 3, calls, x))(x)
        np.testing.assert_array_equal(np.asarray(looped, np.float32), np.asarray(y, np.float32))


@pytest.mark.cuda
def test_more_slices_than_a_grid_has():
    """Several launches a call, which XLA captures."""
    with on("cuda"):
        w = quantize(jnp.ones((3, 8, 32)) * jnp.arange(1, 4)[:, None, None], bits=4, group_size=32)
        index = jnp.arange(70_000) % 3
        x = jnp.ones((70_000, 1, 32), jnp.bfloat16)

        @jax.jit
        def calls(x):
            return [gemv(x * i, w, index=index, implementation="cuda") for i in range(1, 1 + CALLS)]

        for i, y in enumerate(calls(x), 1):
            np.testing.assert_allclose(y[:, 0, 0].astype(jnp.float32), 32.0 * i * (1 + index), rtol=0.02)


@pytest.mark.cuda
def test_kernel_of_a_graph_does_not_change():
    """A program that was compiled for one kernel fails with another, and tells why."""
    if not records():
        pytest.skip("XLA captures each call, and so anew")
    x, ws = jnp.ones((1, K), jnp.bfloat16), [weights(i) for i in range(CALLS)]

    @jax.jit
    def chain(x, ws):
        for w in ws:
            x = gemv(x, w, implementation="cuda")
        return x

    with on("cuda", name="stream"):
        for _ in range(2):  # the first makes no graph
            jax.block_until_ready(chain(x, ws))
    with (
        on("cuda", name="direct"),
        pytest.raises(jax.errors.JaxRuntimeError, match=r"another kernel .* use_only"),
    ):
        jax.block_until_ready(chain(*jax.tree.map(jnp.copy, (x, ws))))
