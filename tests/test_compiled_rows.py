"""Programs compiled for an H200 that need not be there: what they allocate besides their operands and results.

Up to 64 rows nothing. Above, one copy of one weight in x's dtype, which one kernel writes and a matmul reads.
"""

import re
from functools import cache, partial
from math import prod

import h200
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding
from sharded import kernel_calls

from jaxgemv import QuantizedTensor, _dispatch, gemv, reference

N, K, LAYERS, MANY = 4096, 2048, 6, 512
WEIGHT = 2 * N * K  # bytes in 16 bits
# XLA may copy a layer's scales and zeros, and has numbers of its own.
SLACK = 1 << 20


@cache
def sharding() -> SingleDeviceSharding:
    return SingleDeviceSharding(h200.devices()[0])


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding())


def weight(bits=4, *, stack=(), n=N, k=K, group: int | None = 128, form="zero", dtype="bfloat16"):
    parameter = array(*stack, *((n,) if group is None else (n, -(-k // group))), dtype=dtype)
    given = {"zero": parameter, "offset": parameter, "codebook": array(*stack, 1 << bits, dtype="float32")}
    return QuantizedTensor(
        packed=array(*stack, n, -(-k * bits // 32), dtype="uint32"),
        scale=parameter,
        bits=bits,
        group_size=None if group is None or k % group == 0 else group,
        k=None if k * bits % 32 == 0 else k,
        **{form: given[form]} if form in given else {},
    )


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile(compiler_options=h200.COMPILER_OPTIONS)


def temporaries(program) -> int:
    return program.memory_analysis().temp_size_in_bytes


def launches(program) -> int:
    """Kernels of a program without calls: its fusions."""
    return re.findall(r"\nENTRY .*", program.as_text(), re.DOTALL)[0].count(" fusion(")


def written(program, size: int) -> list[str]:
    """The dtypes of all results in memory of so many elements: not of those that exist inside a fusion only."""
    text = program.as_text()
    fused = set(re.findall(r" fusion\(.* calls=%?([\w.-]+)", text))
    outside = [block for block in text.split("\n\n") if block.lstrip("\n%").split(" ")[0] not in fused]
    results = re.findall(
        r"= (\w+)\[([\d,]+)\]\S* (?!bitcast|parameter|get-tuple-element)", "\n".join(outside)
    )
    return [dtype for dtype, dims in results if prod(map(int, dims.split(","))) == size]


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """No GPU is here, whatever machine this is; or set(True): the H200s that programs are made for."""

    def set(here: bool):
        jax.clear_caches()  # of what was lowered
        monkeypatch.setattr(_dispatch, "_capability", lambda: 9 if here else 0)

    set(False)
    return set


@pytest.mark.parametrize("form", ["mid", "zero", "offset", "codebook"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_one_copy(bits, form):
    """By one kernel of ours, for each width and each form."""
    for group in (128, None):
        program = compiled(gemv, array(MANY, K), weight(bits, group=group, form=form))
        assert written(program, N * K) == ["bf16"]
        assert temporaries(program) <= WEIGHT + SLACK
        assert kernel_calls(program) == 1


@pytest.mark.parametrize("bits", [3, 4, 7])
def test_ragged(bits):
    """A short last group, and a word that is not full: rows of x and the weight get zeros, for whole 16 bytes."""
    program = compiled(gemv, array(MANY, K - 3), weight(bits, k=K - 3, group=96))
    assert written(program, N * K) == ["bf16"]
    assert not written(program, N * (K - 3))
    assert temporaries(program) <= WEIGHT + 2 * MANY * K + SLACK


@pytest.mark.parametrize(("x", "kind"), [("float16", "f16"), ("float32", "f32")])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_dtype_of_x(x, kind, implementation):
    f = partial(gemv, implementation=implementation)
    program = compiled(f, array(MANY, K, dtype=x), weight(dtype=x))
    assert written(program, N * K) == [kind]
    assert temporaries(program) <= N * K * jnp.dtype(x).itemsize + SLACK


def test_parts_around():
    """The sums in float32 come to it, where something is done to them; and x, normalised in its own dtype."""
    x, sums = array(MANY, K), 4 * MANY * N
    for f, args, more in (
        (lambda x, w, a: gemv(x, w, bias=a), array(N), sums),
        (lambda x, w, a: gemv(x, w, activation="swiglu", residual=a), array(MANY, N // 2), sums),
        (lambda x, w, a: gemv(x, w, norm=a), array(K), 2 * MANY * K),
    ):
        program = compiled(f, x, weight(), args)
        assert written(program, N * K) == ["bf16"]
        assert temporaries(program) <= WEIGHT + more + SLACK


def test_gradient():
    """Of x, and of x before a norm; two partial sums are the compiler's choice."""
    for norm in ((), (array(K),)):

        def gradient(x, w, ct, *norm):
            return jax.vjp(lambda x: gemv(x, w, norm=norm[0] if norm else None), x)[1](ct)[0]

        program = compiled(gradient, array(MANY, K), weight(), array(MANY, N), *norm)
        assert written(program, N * K) == ["bf16"]
        assert temporaries(program) <= WEIGHT + 2 * 4 * MANY * K + SLACK


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [MANY, 64])
def test_layers(bits, rows):
    """A loop over layers, by index and by scan: a layer's weight at a time, or none at all; x is carried, twice."""
    x, w = array(rows, K), weight(bits, stack=(LAYERS,), n=K)
    carried = 2 * 2 * rows * K

    def by_index(x, w):
        return jax.lax.fori_loop(0, LAYERS, lambda i, x: gemv(x, w, index=i), x)

    def by_scan(x, w):
        return jax.lax.scan(lambda x, w: (gemv(x, w), None), x, w)[0]

    for f in (by_index, by_scan):
        program = compiled(f, x, w)
        many = rows > 64
        assert kernel_calls(program) == 1
        assert written(program, K * K) == ["bf16"] * many
        # Partial sums, as above.
        assert temporaries(program) <= many * (2 * K * K + 2 * 4 * rows * K) + carried + SLACK


@pytest.mark.parametrize("slices", [4, 16])
def test_experts(slices):
    """Many rows each: some small weights at a time. Of twice as many slices as experts, those of one come together."""
    x, ids = array(slices, 128, K), array(slices, dtype="int32")
    program = compiled(lambda x, w, i: gemv(x, w, index=i), x, weight(stack=(8,)), ids)
    moved = 3 * 2 * slices * 128 * (N + K) if slices == 16 else 0
    assert temporaries(program) <= (64 << 20) + moved + SLACK
    assert "f32" not in written(program, N * K)


@pytest.mark.parametrize(("bits", "x"), [(4, "bfloat16"), (8, "float16"), (3, "bfloat16"), (4, "float32")])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_kernels(bits, x, rows):
    """Nothing but x in another order, whatever is asked for."""
    args = array(rows, K, dtype=x), weight(bits, dtype=x)
    program = compiled(gemv, *args)
    assert kernel_calls(program) == 1
    assert temporaries(program) <= 8 * rows * K + SLACK // 16

    def gradient(x, w, ct):
        return jax.vjp(lambda x: gemv(x, w), x)[1](ct)[0]

    program = compiled(gradient, *args, array(rows, N, dtype=x))
    assert kernel_calls(program) == 1
    assert temporaries(program) <= 8 * rows * N + SLACK // 16


@pytest.mark.parametrize("x", ["bfloat16", "float32"])
def test_rounding_kernel(hopper, x):
    """On a Hopper GPU: x in another order, and no weight, until rows are very many."""
    hopper(True)
    most, size, w = 2048, jnp.dtype(x).itemsize, weight(3, n=2 * N, dtype=x)
    for rows in (65, most):
        program = compiled(gemv, array(rows, K, dtype=x), w)
        assert kernel_calls(program) == 1
        assert temporaries(program) <= 1.2 * size * rows * K + SLACK // 16
    program = compiled(gemv, array(most + 1, K, dtype=x), w)
    assert kernel_calls(program) == (x != "float32")
    assert len(written(program, 2 * N * K)) == 1


LOOPS = {
    "int4": dict(),
    "int1-32": dict(bits=1, group=32),
    "int2-offset": dict(bits=2, group=64, form="offset"),
    "int8-row": dict(bits=8, group=None, form=""),
    "nf4": dict(group=64, form="codebook"),
    "table of 256": dict(bits=8, form="codebook"),
}


@pytest.mark.parametrize("of", [*LOOPS, "float8"])
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 1024, 4096), (1, 256, 14336), (2, 1000, 1021), (8, 512, 512), (32, 256, 256)]
)
def test_loops(rows, n, k, of):
    """Few weights and few rows of x: one kernel of XLA's, and nothing besides its operands and result."""
    if of == "float8":
        w = QuantizedTensor(packed=array(n, k, dtype="float8_e4m3fn"), scale=array(n))
    else:
        w = weight(n=n, k=k, **LOOPS[of])
    program = compiled(gemv, array(rows, k), w)
    assert kernel_calls(program) == 0
    assert launches(program) == 1
    assert temporaries(program) == 0


@pytest.mark.parametrize(
    ("rows", "n", "k", "of"),
    [
        (1, 4096, 4096, {}),
        (1, 2048, 2048, {}),
        (2, 1024, 2048, {}),
        (1, 256, 16384, {}),
        (1, 1, 2048, {}),
        (1, 256, 256, dict(bits=3)),
        (1, 256, 256, dict(stack=(8,))),
    ],
)
def test_no_loops(rows, n, k, of):
    """Where XLA would take longer, or write the weight."""
    w, args = weight(n=n, k=k, **of), [array(dtype="int32")] if "stack" in of else []
    program = compiled(lambda x, w, *i: gemv(x, w, index=i[0] if i else None), array(rows, k), w, *args)
    assert kernel_calls(program) == 1


def test_kernels_of_experts():
    """The stack is read where it is; x, its image and y are put together by expert, in tiles that are not all full."""
    x, w, ids = array(64, K), weight(stack=(8,)), array(64, dtype="int32")
    program = compiled(lambda x, w, i: gemv(x, w, index=i), x, w, ids)
    assert kernel_calls(program) == 1
    image = 2.4 * 64 * K
    assert temporaries(program) <= 3 * (2 * 64 * (N + K) + image)


def test_dense_rows_that_vmap_puts_together():
    """Of a dense weight one row is a sum of products, and several are a matmul, also as rows of one each."""
    w = array(N, K)
    one, several = compiled(gemv, array(1, K), w), compiled(jax.vmap(gemv, (0, None)), array(16, 1, K), w)
    assert "gemm" not in one.as_text()
    assert "gemm" in several.as_text()


def test_what_the_checks_would_see():
    """The float32 matrix of the reference."""
    program = compiled(reference.gemv, array(MANY, K), weight())
    assert "f32" in written(program, N * K)
    assert temporaries(program) >= 2 * WEIGHT
