"""For each CUDA kernel, shapes that it must take: part of cases.py."""

import math

from problems import Case


def stream(bits: int) -> list[Case]:
    """Rows of whole 16 bytes, or few rows of x; 16 of them and more; rows of scales of whole words, or an even number
    of others, or one scale.

    Groups of a part of what a warp has of a row, and of several such parts.
    """
    if bits not in (2, 4, 8):
        return stream_rare(bits)
    least = 128 // bits
    small, middle, large = (64, 128, 256) if bits == 2 else (32, 64, 128)
    cases = [
        Case(1, 16, least, "row", "mid"),
        Case(1, 40, 1280, middle, "zero", bias=True),
        Case(2, 33, 1536, large, "offset"),
        Case(3, 17, 1536, small, "zero", bytes=True),
        Case(8, 130, 2048, small, "fraction", scale="float16"),
        Case(5, 31, 3 * large + least, large, "zero"),  # a ragged group
        Case(9, 50, 1280 + least, "row", "integer", scale="float32"),
        Case(16, 64, 4096, large, "zero", bias=True, scale="bfloat16"),
        Case(16, 24, 512, "tensor", "offset"),
        Case(1, 50, 4096, 512, "zero", bias=True),
        Case(1, 17, 1536, small, "fraction", scale="float32"),
        Case(2, 40, 5 * middle, middle, "offset", scale="float32"),  # an odd number of groups
        # Groups of several spans, one after the other.
        Case(1, 40, 8192, 1024, "zero", scale="float32"),
        Case(2, 24, 8192, 2048, "offset", scale="float32"),
        Case(1, 33, 3 * 2048 + least, 2048, "zero"),
        Case(4, 33, 3 * 512 + least, 512, "zero", scale="float32"),  # a ragged group
        Case(8, 24, 6144, 1024, "zero", bytes=True),
        Case(16, 70, 4096, 512, "mid"),
        Case(3, 47, 1280, middle, "fraction", bias=True),  # three CTAs, of which one has a row less
        # 16-bit scales of an odd number of groups.
        Case(1, 70, 7 * large, large, "zero", scale="bfloat16", bias=True),
        Case(2, 18, 8 * large + least, large, "offset", scale="float16"),
        Case(8, 130, 3 * large, large, "fraction", scale="float16"),
        Case(16, 66, 13 * large, large, "zero", scale="bfloat16"),
        *stream_words(middle, large),
    ]
    if bits == 8:
        cases += [Case(4, 34, 5 * middle, middle, "zero", scale="bfloat16")]
    if bits == 2:
        cases += [Case(17, 40, 1024, small, "zero"), Case(64, 33, 1024, middle, "offset", bias=True)]
        cases += [Case(1, 40, 1280, 32, "zero"), Case(1, 33, 4096 + 64, 32, "fraction", scale="float32")]
    return cases


def stream_rare(bits: int) -> list[Case]:
    """Up to two rows; one scale a row as one for a long group."""
    least, small, middle = (64, 32, 64) if bits == 6 else (128, 128, 256) if bits == 1 else (128, 32, 64)
    return [
        Case(1, 17, least, "row", "mid", scale="float32"),
        Case(1, 40, 1280, middle, "zero", bias=True),
        Case(2, 33, 1536, 128, "offset"),
        Case(2, 17, 1536, small, "zero", bytes=True),
        Case(1, 48, 4096, middle, "fraction", scale="float16"),
        Case(1, 31, 3 * 256 + least, 256, "zero", scale="float32"),  # a ragged group
        Case(2, 24, 4096 + least, "row", "zero", scale="bfloat16"),
        Case(2, 50, 1280 + least, "row", "integer", scale="float32"),
        Case(1, 130, 4096, 512, "offset", bias=True),
        Case(2, 70, 2 * 4096, 1024, "zero"),
        Case(1, 33, 1536, small, "fraction", scale="float32"),
        # 16-bit scales of an odd number of groups.
        Case(1, 66, 13 * 128, 128, "zero", scale="bfloat16"),
        Case(2, 18, 3 * 256, 256, "offset", scale="float16"),
        Case(1, 24, 5 * 512, 512, "zero"),
        *stream_words(middle, 256),
    ]


def stream_words(group: int, large: int) -> list[Case]:
    """Up to two rows, of any K."""
    return [
        Case(1, 16, 1, "row", "mid", scale="float32"),
        Case(1, 33, 1001, "row", "mid", bias=True, scale="float32"),
        Case(2, 40, 1000, group, "offset", scale="float32"),
        Case(1, 47, 4099, "row", "zero", bytes=True, scale="bfloat16"),
        Case(2, 21, 2051, "row", "fraction", scale="float16", bias=True),
        Case(1, 40, 5 * group, group, "zero", scale="bfloat16"),
        Case(2, 18, 7 * group + 5, group, "offset", scale="bfloat16"),
        # Odd numbers of groups, 16-bit, and of rows: the last tile ends behind the last row.
        Case(1, 17, 16 * large + 3, large, "zero", scale="bfloat16", bias=True),
        Case(2, 51, 9 * large, large, "fraction", scale="float16"),
        Case(1, 34, 3 * large + 2, large, "zero", scale="float32", bias=True),
    ]


def wgmma(bits: int) -> list[Case]:
    """9 to 64 rows, N from 256 on, K and groups in multiples of 128, scale and zero of one dtype."""
    return [
        Case(9, 256, 128, "row", "mid"),
        Case(16, 300, 1024, 128, "zero", bias=True),
        Case(17, 256, 512, "tensor", "offset"),
        Case(24, 300, 640, 256, "zero"),  # a ragged group
        Case(32, 513, 2048, 256, "fraction", scale="float32"),
        Case(33, 257, 1152, 384, "zero", scale="float16"),
        Case(40, 256, 1024, 128, "offset", scale="bfloat16"),
        Case(64, 260, 4096, 128, "zero", bias=True, bytes=True),
    ]


def wgmma_tma(bits: int) -> list[Case]:
    """2 to 64 rows; rows of whole 16 bytes, groups of whole 32, or one scale a row, of any dtype.

    16, 32 and 64 columns, more than a CTA has; groups of warps and CTAs that share K; a box that ends in the middle.
    Groups of 32 and 64, whose scales are copied ahead where a row has whole fours of them; and others.
    """
    least = 128 // math.gcd(bits, 128)  # codes of whole 16 bytes
    cases = [
        *wgmma(bits),
        Case(2, 300, 4096, 128, "zero", bias=True),
        Case(3, 65, 896, 32, "offset", scale="float32"),
        Case(5, 513, 1024, "row", "mid"),
        Case(8, 130, 14336, 64, "fraction", scale="bfloat16"),
        Case(9, 100, 896, 32, "integer", scale="float16"),
        Case(16, 65, 2880, 32, "zero", scale="bfloat16"),  # in the middle of a quad
        Case(24, 130, 1056, 32, "fraction", scale="bfloat16"),  # 33 groups
        Case(33, 70, 1152, 96, "offset", scale="float32"),
        Case(17, 40, 1344, 64, "offset", scale="float32"),
        Case(64, 300, 4096, 64, "zero", bias=True),
        Case(48, 33, 960, 192, "mid", scale="float16"),
        Case(12, 20, 14336, 64, "zero", bytes=True),
        Case(40, 257, 2048, 32, "zero", scale="float32"),
        Case(15, 90, 4096, 32, "mid", bias=True),
        Case(10, 33, 896 + least, 128, "zero", bias=True),
        Case(20, 1, 14336 + 3 * least, "row", "mid"),
        Case(12, 70, 3584, 128, "integer", scale="float32"),
        Case(31, 200, 8192, "row", "zero", bias=True),
        # Many threads look at a row of x, or CTAs share the look, the last one without a part of it; or both.
        Case(2, 40, 4224, 32, "zero", scale="bfloat16"),
        Case(14, 70, 4224, "row", "zero"),
        Case(3, 40, 16512, 128, "zero"),
        # Three groups of warps have rows, in the last CTA fewer; results in fours and one by one, of more rows too.
        Case(16, 196, 128, "row", "offset", bias=True),
        Case(20, 700, 256, 128, "zero", scale="bfloat16"),
        Case(64, 451, 128, 32, "fraction", bias=True),
        Case(40, 17032, 128, 64, "zero"),
        # Groups of warps that share K take boxes by fours.
        Case(40, 70, 8192, 128, "offset", scale="float32"),
        Case(64, 300, 16384, 128, "zero", bias=True),
    ]
    return [case._replace(k=-(-case.k // least) * least) for case in cases]


def mma_any(bits: int) -> list[Case]:
    """Groups of whole 16, or one scale a row, of any dtype; rows that begin at any word; up to 64 columns and more.

    Few columns, of which a CTA makes its own image, 8, 16, 32 and 64; K of one unit and of many; two and more slices.
    """
    return [
        Case(1, 1, 1, "tensor", "mid"),
        Case(1, 5, 1280, 128, "zero", bias=True),
        Case(2, 300, 4099, 256, "offset", scale="float32"),  # a ragged group, rows of odd words
        Case(2, 40, 896, 32, "integer", bytes=True),
        Case(3, 16, 999, 64, "zero", bias=True, scale="bfloat16"),
        Case(7, 33, 2880, 16, "fraction", scale="float16"),
        Case(8, 130, 8192, "row", "mid"),
        Case(9, 40, 1024, 96, "integer", bytes=True),
        Case(16, 65, 1536, "tensor", "mid", scale="float32"),
        Case(17, 129, 1536, 160, "zero", scale="bfloat16"),
        Case(33, 70, 1024, "row", "offset", bias=True),
        Case(64, 31, 4096, 48, "zero"),
        Case(65, 16, 512, 128, "zero"),
        Case(0, 16, 512, 128, "zero"),
    ]


def wgmma_any(bits: int) -> list[Case]:
    """As mma_any, where x has an image: 32, 64 and 128 columns, more than a CTA has, groups of warps that share K.

    Not float32 scales of groups of 16 with less than 5 bits, for which there is no room.
    """
    return [
        Case(9, 256, 128, "row", "mid"),
        Case(16, 300, 1024, 128, "zero", bias=True),
        Case(17, 70, 4099, 256, "offset", scale="float32"),  # a ragged group, rows of odd words
        Case(24, 33, 640, 16, "zero", scale="float16"),
        Case(32, 513, 2048, 256, "fraction", scale="float32"),
        Case(33, 257, 1152, 384, "zero", scale="float16"),
        Case(40, 90, 999, 32, "integer", scale="bfloat16", bytes=True),
        Case(63, 1, 14336, 64, "zero"),
        Case(64, 260, 4096, 128, "zero", bias=True, bytes=True),
        Case(65, 16, 512, "tensor", "offset"),
        Case(200, 31, 1000, "row", "mid", bias=True),
    ]


def gemm(bits: int) -> list[Case]:
    """From 65 rows on, and as mma_any: one and several tiles of x, groups of warps and CTAs that share K."""
    return [
        Case(65, 256, 128, "row", "mid"),
        Case(128, 300, 1024, 128, "zero", bias=True),
        Case(70, 70, 4099, 256, "offset", scale="float32"),  # a ragged group, rows of odd words
        Case(66, 33, 640, 16, "zero", scale="float16"),
        Case(129, 513, 2048, 256, "fraction", scale="float32"),
        Case(300, 257, 1152, 384, "zero", scale="float16"),
        Case(90, 90, 999, 32, "integer", scale="bfloat16", bytes=True),
        Case(65, 1, 14336, 64, "zero"),
        Case(257, 260, 4096, 128, "zero", bias=True, bytes=True),
        Case(80, 16, 512, "tensor", "offset"),
        Case(200, 31, 1000, "row", "mid", bias=True),
        Case(72, 1100, 2880, 48, "fraction"),
        Case(65, 9, 7, "row", "zero"),
    ]


def gemm_tma(bits: int) -> list[Case]:
    """From 65 rows on, of rows that are whole 16 bytes and groups of whole 32: ends of tiles, of stages of 64 codes and
    of boxes of more. The last two are pairs of CTAs."""
    return [
        Case(65, 256, 128, "row", "mid"),
        Case(128, 300, 1024, 128, "zero", bias=True),
        Case(70, 70, 4096 + 128, 256, "offset", scale="float32"),
        Case(66, 33, 640, 32, "zero", scale="float16"),
        Case(129, 513, 2048, 256, "fraction", scale="float32"),
        Case(300, 257, 1152, 384, "zero", scale="float16"),
        Case(90, 90, 896, 32, "integer", scale="bfloat16", bytes=True),
        Case(65, 1, 14336, 64, "zero"),
        Case(257, 260, 4096, 128, "zero", bias=True, bytes=True),
        Case(80, 16, 512, "tensor", "offset"),
        Case(200, 31, 1024, "row", "mid", bias=True),
        Case(600, 1100, 2944, 96, "fraction"),
        Case(1000, 130, 256, 128, "zero"),
        Case(65, 140, 128, 128, "zero"),
        Case(513, 8200, 1152, 64, "zero", bias=True),
        Case(1030, 4230, 640, "row", "integer", scale="float32", bytes=True),
    ]


def direct(bits: int) -> list[Case]:
    """Groups of whole 32, or one scale a row, of any dtype; whole octets of x; any rows of it.

    Units of one, two and four blocks, which groups end in and rows of x; K of less than a warp, of several warps and of
    a cluster.
    """
    return [
        Case(1, 1, 8, "tensor", "mid"),
        Case(1, 300, 256, 64, "offset", bias=True),
        Case(1, 5, 1288, 32, "zero", scale="float32"),  # a ragged group
        Case(1, 70, 14336, 128, "zero", bias=True),
        Case(2, 300, 4096, 256, "offset", scale="float32"),
        Case(2, 40, 896, 32, "integer", bytes=True),
        Case(3, 16, 1000, 64, "zero", bias=True, scale="bfloat16"),  # rows of odd words
        Case(4, 512, 512, 32, "offset"),
        Case(5, 33, 2880, 96, "fraction", scale="float16"),
        Case(8, 130, 4096, "row", "mid"),
        Case(9, 40, 1024, 192, "integer", bytes=True),
        Case(16, 65, 1536, "tensor", "mid", scale="float32"),
        Case(17, 129, 520, 160, "zero", scale="bfloat16"),
        Case(64, 31, 2048, 384, "zero", bias=True),
        Case(65, 16, 512, 128, "zero"),
        Case(0, 16, 512, 128, "zero"),
        # So many rows of weights that a warp has several units of K, the last of them ragged.
        Case(3, 2100, 1256, 32, "zero", bias=True),
        Case(1, 2500, 1184, 64, "offset"),
        Case(10, 2200, 1120, 96, "fraction", scale="bfloat16"),
    ]


def direct_floats(bits: int) -> list[Case]:
    """The same without shifts, scales of one byte, and of tables groups of 16 in a lane's half of a block."""
    cases = [
        *(case._replace(form="mid") for case in direct(bits)),
        Case(3, 129, 1312, 32, bias=True, scale="float8_e8m0fnu"),
        Case(20, 40, 576, 64, scale="float8_e8m0fnu"),
        Case(1, 300, 2880, "row", scale="float8_e4m3fn"),
    ]
    if bits == 4:
        cases += [
            Case(1, 300, 1032, 16, bias=True, scale="float8_e4m3fn"),  # ends with half of a group
            Case(2, 130, 4112, 16, scale="float8_e4m3fn"),
            Case(4, 2200, 1144, 16, scale="float8_e4m3fn"),
            Case(9, 40, 16, 16, scale="float32"),
            Case(33, 31, 896, 16, bytes=True),
        ]
    return cases


def fma(bits: int) -> list[Case]:
    """Groups of whole 32, or one scale a row, of any dtype and of any rows of x; whole blocks and ragged ones.

    Fewer rows of the weights than a lane has; rows that several lanes, and several warps, share; and so many that a
    lane has several.
    """
    return [
        Case(1, 1, 1, "tensor", "mid"),
        Case(1, 300, 256, 64, "offset", bias=True),
        Case(2, 5, 1288, 32, "zero", scale="float32"),  # a ragged group
        Case(2, 67, 14336, 128, "zero", bias=True),
        Case(1, 1100, 4096, 256, "offset", scale="float32"),
        Case(1, 3, 896, 32, "integer", bytes=True),
        Case(2, 2050, 2880, 96, "fraction", bias=True, scale="float16"),
        Case(2, 16, 999, 64, "zero", scale="bfloat16"),  # rows of odd words
        Case(1, 4099, 1043, "row", "zero"),
        Case(3, 130, 4096, "row", "mid"),
        Case(17, 33, 200, 32, "integer", bytes=True),
        Case(0, 16, 512, 128, "zero"),
    ]
