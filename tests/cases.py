"""For each kernel by name, shapes that it must take.

A kernel that refuses one of these is never missed by anyone else: another one runs the call, and is slower.
"""

from cases_cuda import (
    direct,
    direct_floats,
    fma,
    gemm,
    gemm_tma,
    mma_any,
    stream,
    wgmma,
    wgmma_any,
    wgmma_tma,
)
from kernels import FLOATS, KernelParam, is_wide_table, most_rows
from problems import Case


def reference(bits: int) -> list[Case]:
    """All forms and layouts of the parameters; XLA takes any shape."""
    return [
        Case(1, 5, 1, "tensor", "mid"),
        Case(3, 17, 33, 5, "offset", bytes=True),
        Case(7, 31, 130, 64, "mid", bias=True, scale="float16"),
        Case(2, 6, 7, "row", "fraction"),
        Case(2, 48, 256, 32, "integer", bias=True),
        Case(17, 20, 384, 128, "zero", scale="float32"),
        Case(0, 8, 64, 32, "zero"),
    ]


def anything(bits: int) -> list[Case]:
    """Of no shape that suits a fast kernel, and some that do: tails of both dimensions, all layouts of parameters."""
    return [
        Case(1, 1, 1, "tensor", "mid"),
        Case(1, 1, 4099, 100, "zero"),  # one output
        Case(4, 9, 1, "row", "offset", bias=True),  # one input
        Case(2, 6, 7, "row", "fraction"),  # less than an octet
        Case(1, 5, 8, 1, "zero"),  # a scale for each code
        Case(3, 17, 33, 5, "offset", bytes=True),  # ragged groups across words
        Case(7, 31, 130, 64, "mid", bias=True),
        Case(9, 66, 264, 1000, "zero"),  # the group is longer than the row
        Case(1, 130, 999, 27, "integer"),
        Case(0, 8, 64, 32, "zero"),  # no rows at all
        Case(1, 40, 512, 128, "zero", scale="float32"),
        Case(3, 67, 200, 40, "offset", bias=True, scale="float16"),
        Case(8, 24, 96, "row", "mid", bytes=True, scale="bfloat16"),
        Case(5, 33, 77, 16, "fraction"),
        Case(2, 48, 256, 32, "integer", bias=True),
        Case(1, 64, 4096, 128, "zero"),
        Case(16, 32, 2048, 64, "offset"),
        Case(17, 20, 384, 128, "zero"),
        Case(65, 16, 256, "row", "mid"),
        Case(9, 520, 200, 24, "zero"),  # more rows of weights than for which a CPU reads x where it is
        Case(5, 520, 130, "row", "offset"),
    ]


def int8_dot(bits: int) -> list[Case]:
    """Up to two rows; groups of whole blocks, or of whole lanes: 512 and 32 bits, or 64 codes and 4."""
    block, lane = (64, 4) if 8 % bits else (512 // bits, 32 // bits)
    return [
        Case(1, 1, 1, "tensor", "mid"),
        Case(1, 40, 1280, block, "zero", bias=True, scale="float32"),
        Case(2, 67, 2 * block + lane, 2 * block, "offset"),
        Case(1, 33, 1100, "row", "integer", bytes=True),
        Case(2, 24, 999, lane, "fraction", scale="float16"),
        Case(1, 130, 4096, 4 * lane, "zero", scale="bfloat16"),
        Case(2, 6, 7, "row", "fraction"),
    ]


def f32_dot(bits: int) -> list[Case]:
    """Up to two rows, and whole blocks: groups of these or of parts of one."""
    return [
        Case(1, 40, 512, 64, bias=True),
        Case(2, 67, 1056, "row", bytes=True),
        Case(1, 33, 256, 8, scale="float32"),
        Case(2, 24, 1024, 16, scale="float8_e4m3fn"),
        Case(1, 130, 4096, 32, scale="float8_e8m0fnu"),
        Case(1, 5, 64, "tensor"),
    ]


def bf16_dot(bits: int) -> list[Case]:
    """Up to two rows, and whole blocks of 64 bytes: groups of these or of parts of one; or one of all."""
    block, lane = 512 // bits, 32 // bits
    return [
        Case(1, 1, 1, "tensor", "mid"),
        Case(1, 40, 1280, block, "zero", bias=True, scale="float32"),
        Case(2, 67, 2 * block + 1, 2 * block, "offset"),
        Case(1, 33, 1100, "row", "integer", bytes=True),
        Case(2, 24, 999, lane, "fraction", scale="float16"),
        Case(1, 130, 4096, 4 * lane, "zero", scale="bfloat16"),
        Case(2, 6, 7, "row", "fraction"),
        Case(0, 8, 64, "row", "zero"),
    ]


def float_panel(bits: int) -> list[Case]:
    """Of codes that stand for floats what `anything` has of integers, in fewer."""
    return [
        Case(1, 1, 1, "tensor"),
        Case(5, 33, 77, 16, bias=True, scale="float32"),
        Case(3, 17, 33, 5, bytes=True, bias=True),  # ragged groups across words
        Case(17, 40, 384, 32),
        Case(9, 66, 264, 1000, scale="float8_e4m3fn"),
        Case(2, 48, 256, 1, scale="float8_e8m0fnu"),
    ]


def float_pairs(bits: int) -> list[Case]:
    """From 12 rows on, and groups of 32 codes and more."""
    return [
        Case(12, 75, 1152, 128, bias=True),
        Case(33, 48, 640, 32, scale="float8_e8m0fnu", bytes=True),
        Case(17, 33, 1100, "row"),
    ]


def bf16_dot_floats(bits: int) -> list[Case]:
    """Codebooks have the scale's dtype, which has to be bfloat16."""
    block = 512 // bits
    return [
        Case(1, 40, 1280, block, bias=True),
        Case(2, 67, 2 * block + 1, "row", bytes=True),
        Case(1, 33, 1024, block // 2),
        Case(2, 24, 999, 32, scale="float8_e8m0fnu"),
        Case(1, 5, 64, "tensor"),
    ]


def stream_floats(bits: int) -> list[Case]:
    """Groups of a block or several and, with one-byte or 16-bit scales of 4 bits, of half a block."""
    small, large = (32, 128) if bits == 4 else (32, 64)
    cases = [
        Case(1, 16, 128 // bits, "row"),
        Case(1, 40, 1280, 64, bias=True),
        Case(2, 33, 1536, large, scale="float32"),
        Case(3, 17, 1536, small, bytes=True),
        Case(8, 130, 2048, 64, scale="float16"),
        Case(1, 31, 3 * large + 32, large, scale="float32"),  # a ragged group
        Case(9, 50, 1312, "row", scale="float32"),
        Case(16, 64, 4096, large, bias=True),
        Case(2, 48, 2048, 32, scale="float8_e8m0fnu"),
        Case(5, 24, 512, "tensor"),
        Case(1, 34, 5 * 64, 64, scale="float16"),  # an odd number of groups
        Case(2, 48, 7 * 128, 128, scale="bfloat16", bias=True),
        Case(9, 18, 3 * 64, 64, scale="float16"),
    ]
    if bits == 4:
        cases += [
            Case(1, 70, 2048, 16, scale="float8_e4m3fn", bias=True),
            Case(5, 33, 1088, 16, scale="float8_e4m3fn"),
            Case(8, 17, 96, 16),
            # Rows that are no whole 16 bytes, and K of any value; odd numbers of rows and groups.
            Case(1, 33, 1001, "row", bias=True),
            Case(1, 17, 8 * 128 + 3, 128, scale="bfloat16"),
            Case(2, 26, 8 * 32 + 1, 32, scale="float16"),
            Case(2, 21, 7 * 128, 128, scale="float16"),
            Case(2, 40, 1000, 64, scale="float32", bias=True),
        ]
    return cases


def amx_int8(bits: int) -> list[Case]:
    """From two rows on, and groups of a quarter of a tile's row."""
    return [
        Case(2, 40, 1280, 128, "zero", bias=True),
        Case(3, 67, 1100, 192, "offset", scale="float32"),
        Case(8, 24, 2048, "row", "mid", bytes=True),
        *amx_bf16(bits),
    ]


def amx_bf16(bits: int) -> list[Case]:
    """From 12 rows on, and as amx_int8."""
    return [
        Case(12, 75, 1100, 128, "zero", bias=True),
        Case(17, 33, 1024, "row", "integer"),
        Case(33, 48, 640, 256, "fraction", scale="float16"),
        Case(65, 16, 512, "tensor", "offset", bytes=True),
    ]


def amx_panel(bits: int) -> list[Case]:
    """Rows from 192 codes on, any group. A step has 32 codes, a panel 128, and 8 row blocks share x of a panel."""
    return [
        Case(1, 40, 192, 7, "zero", bias=True),
        Case(9, 33, 1111, 33, "fraction", bytes=True),  # the last step is not whole
        Case(17, 75, 640, 16, "offset", scale="float32"),
        Case(33, 300, 1056, 128, "integer"),
        Case(64, 16, 512, "tensor", "mid", scale="float16"),
    ]


def bf16_weights(bits: int) -> list[Case]:
    """As amx_panel, with more than 64 rows and any K."""
    return [
        Case(66, 1, 1, "tensor", "mid"),
        Case(65, 40, 192, 7, "zero", bias=True),
        Case(70, 33, 1111, 33, "fraction", bytes=True),
        Case(81, 75, 640, 16, "offset", scale="float32"),
        Case(130, 300, 1056, 128, "integer"),
        Case(513, 16, 70, "tensor", "mid", scale="float16"),
    ]


def bf16_panel(bits: int) -> list[Case]:
    """Groups of 32 codes and more. 8 rows are multiplied at once, 128 codes summed, 512 rows share a panel."""
    return [
        Case(1, 1, 1, "tensor", "mid"),
        Case(2, 6, 7, "row", "fraction"),
        Case(3, 67, 1100, 40, "offset", bias=True, scale="float16"),  # groups that begin anywhere
        Case(4, 33, 999, 33, "zero", bytes=True),
        Case(7, 40, 1280, 128, "integer", bias=True),
        Case(8, 130, 4099, 100, "zero"),
        Case(9, 24, 96, "row", "mid", bytes=True, scale="bfloat16"),
        Case(17, 20, 384, 32, "zero"),
        Case(33, 48, 256, 64, "integer", bias=True, scale="float32"),
        Case(65, 16, 250, 1000, "offset"),  # the group is longer than the row
        Case(513, 33, 130, 64, "fraction", bias=True),
        Case(0, 8, 64, 32, "zero"),
    ]


def amx_floats(bits: int) -> list[Case]:
    """Those in groups of a quarter of a tile's row."""
    whole = 128 // bits
    return [c for c in float_pairs(bits) if isinstance(c.group, str) or c.group >= min(whole, c.k)]


def without_shifts(cases):
    """The same for codes that stand for floats."""
    return lambda bits: [case._replace(form="mid") for case in cases(bits)]


# The transposed ones: a bias has no part in these.


def transposed_floats(bits: int) -> list[Case]:
    """As transposed_anything, in fewer."""
    return [
        Case(3, 67, 200, 40, scale="float32"),
        Case(8, 25, 96, "row", bytes=True),
        Case(17, 301, 530, 33, scale="float8_e4m3fn"),
        Case(2, 150, 2081, 384),
    ]


def transposed_anything(bits: int) -> list[Case]:
    """Several tiles of both dimensions, and groups that begin in the middle of one, or of a block of codes."""
    return [
        Case(1, 40, 512, 128, "zero"),
        Case(3, 67, 200, 40, "offset", scale="float16"),
        Case(8, 24, 96, "row", "mid", bytes=True),
        Case(5, 33, 77, 16, "fraction", scale="float32"),
        Case(2, 48, 256, 32, "integer"),
        Case(1, 1, 1, "tensor", "mid"),
        Case(4, 9, 1, "row", "offset"),
        Case(2, 6, 7, "row", "fraction"),
        Case(1, 5, 8, 1, "zero"),
        Case(1, 700, 1061, 96, "zero"),
        Case(2, 150, 2081, 384, "offset", scale="bfloat16"),
        Case(17, 301, 530, 33, "integer", bytes=True),
        Case(9, 66, 264, 1000, "zero"),
        Case(0, 8, 64, 32, "zero"),
        Case(33, 129, 384, 128, "zero"),
        Case(65, 70, 256, 64, "offset"),
    ]


def transposed_whole(bits: int) -> list[Case]:
    """One scale a row, and groups of strips or of half of one."""
    half, strip = (64, 128) if bits == 2 else (32, 64)
    return [
        Case(1, 512, 2048, 128, "mid"),
        Case(4, 260, 1280, strip, "zero", scale="float16"),
        Case(16, 129, 1536, half, "offset"),
        Case(8, 24, 96, "row", "fraction"),
        Case(2, 67, 200, "row", "zero", scale="float32"),
        Case(1, 700, 1088, 384, "zero", bytes=True),
        Case(17, 301, 640, 256, "integer", scale="bfloat16"),
        Case(9, 66, 264, 1000, "zero"),
        Case(33, 129, 512, half, "zero"),
        Case(65, 70, 256, "tensor", "offset"),
    ]


MUST_TAKE = {
    "stream": stream,
    "wgmma": wgmma,
    "wgmma_tma": wgmma_tma,
    "mma_any": mma_any,
    "wgmma_any": wgmma_any,
    "gemm": gemm,
    "gemm_tma": gemm_tma,
    "direct": direct,
    "fma": fma,
    "simt": anything,
    "int8_dot": int8_dot,
    "f32_panel": anything,
    "amx_int8": amx_int8,
    "amx_bf16": amx_bf16,
    "amx_panel": amx_panel,
    "bf16_panel": bf16_panel,
    "bf16_weights": bf16_weights,
    "bf16_dot": bf16_dot,
    "": reference,
}
# Of codes that stand for floats, where those are others.
MUST_TAKE_FLOATS = {
    "simt": float_panel,
    "stream": stream_floats,
    "mma_any": without_shifts(mma_any),
    "wgmma_tma": without_shifts(wgmma_tma),
    "wgmma_any": without_shifts(wgmma_any),
    "gemm": without_shifts(gemm),
    "gemm_tma": without_shifts(gemm_tma),
    "direct": direct_floats,
    "f32_dot": f32_dot,
    "f32_panel": float_panel,
    "bf16_panel": float_pairs,
    "bf16_dot": bf16_dot_floats,
    "amx_bf16": amx_floats,
    "amx_panel": without_shifts(amx_panel),
    "bf16_weights": without_shifts(bf16_weights),
}
MUST_TAKE_TRANSPOSED = {
    ("cuda", "transposed"): transposed_whole,
    ("cuda", "transposed_simt"): transposed_anything,
    ("cpu", "transposed"): transposed_anything,
    ("xla", ""): reference,
}


def has_groups(case: Case) -> bool:
    """What `stream` takes of a table's with float32 x: groups of 32 codes and more or scales of one byte; rows of whole
    16 bytes, and where they have odd numbers of 16-bit scales, an even number of rows."""
    if isinstance(case.group, str) or case.k % 32 or (case.group < 32 and "float8" not in case.scale):
        return False
    odd = case.scale in ("float16", "bfloat16") and -(-case.k // case.group) % 2 != 0
    return not odd or (case.n % 2 == 0 and case.group >= 64)


def must_take(kernel: KernelParam, transposed: bool = False) -> list[Case]:
    if kernel.format != "affine":
        cases = transposed_floats if transposed else MUST_TAKE_FLOATS[kernel.name]
    else:
        cases = MUST_TAKE_TRANSPOSED[kernel.backend, kernel.name] if transposed else MUST_TAKE[kernel.name]
    if (last := most_rows(kernel)) is not None:
        taken = [case._replace(m=min(case.m, last)) for case in cases(kernel.bits)]
        return [case for case in taken if has_groups(case)] if is_wide_table(kernel) else taken
    # Every width meets all of them, with one x or another.
    if cases in (
        anything,
        direct,
        direct_floats,
        fma,
        mma_any,
        wgmma_any,
        wgmma_tma,
        gemm,
        gemm_tma,
        transposed_anything,
        float_panel,
        transposed_floats,
    ):
        some = cases(kernel.bits)[(kernel.bits + FLOATS.index(kernel.x)) % 2 :: 2]
        # Of float32 beside others than integers one row too.
        is_first = (kernel.name, kernel.x) == ("wgmma_tma", "float32") and kernel.format != "affine"
        return [case._replace(m=1) for case in some if is_first and case.m in (2, 3)] + some
    return cases(kernel.bits)
