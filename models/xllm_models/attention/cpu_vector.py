"""The inner loops of paged decode attention, written as vector instructions.

They multiply a few query rows (the heads that share one K/V head) with a strip of cached vectors and keep their sums
in registers, which the loops that numba vectorises by itself do not: those read and write the sums in memory for every
four products. LANES positions (or head dimensions) make a vector; callers do what is left over. Knows float32 and
bfloat16 only. LLVM maps the vectors to whatever the machine has.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
WIDE = 2  # vectors side by side in one pass
MAX_ROWS = 4  # query rows of one pass; their sums fill WIDE * MAX_ROWS registers

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)


def _pointer(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _load_vector(builder, address, index, bfloat):
    """LANES elements from element `index` of the array at `address`, as float32."""
    if not bfloat:
        place = builder.gep(_pointer(builder, address, _F32), [index])
        return builder.load(builder.bitcast(place, _VECTOR.as_pointer()), align=4)
    place = builder.gep(_pointer(builder, address, _I16), [index])
    bits = builder.load(builder.bitcast(place, ir.VectorType(_I16, LANES).as_pointer()), align=2)
    wide = builder.zext(bits, ir.VectorType(_I32, LANES))
    shift = ir.Constant(ir.VectorType(_I32, LANES), [16] * LANES)
    return builder.bitcast(builder.shl(wide, shift), _VECTOR)


def _broadcast(builder, address, index):
    """The float32 at `index`, in every lane."""
    scalar = builder.load(builder.gep(_pointer(builder, address, _F32), [index]), align=4)
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_I32, 0))
    lanes = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined), lanes)


def _product(rows, vectors, bfloat, by_column):
    """An intrinsic: for rows r and strips of LANES from column `begin`, sum over j of left[r, j] * right[j, strip].

    Arguments (int64): left, its row stride, right, its row stride, count of j, begin, out, its row stride. With
    `by_column` the sums are added to what `out` holds. Strides count elements.
    """

    def codegen(context, builder, signature, args):
        left, left_stride, right, right_stride, count, begin, out, out_stride = args

        def out_place(row, v):
            column = builder.add(begin, ir.Constant(_I64, v * LANES))
            index = builder.add(builder.mul(ir.Constant(_I64, row), out_stride), column)
            return builder.bitcast(builder.gep(_pointer(builder, out, _F32), [index]), _VECTOR.as_pointer())

        sums = {}
        for row in range(rows):
            for v in range(vectors):
                start = builder.load(out_place(row, v), align=4) if by_column else ir.Constant(_VECTOR, [0.0] * LANES)
                sums[row, v] = cgutils.alloca_once_value(builder, start)
                builder.store(start, sums[row, v])
        with cgutils.for_range(builder, count) as loop:
            base = builder.add(builder.mul(loop.index, right_stride), begin)
            strips = [_load_vector(builder, right, builder.add(base, ir.Constant(_I64, v * LANES)), bfloat)
                      for v in range(vectors)]
            for row in range(rows):
                index = builder.add(builder.mul(ir.Constant(_I64, row), left_stride), loop.index)
                factor = _broadcast(builder, left, index)
                for v in range(vectors):
                    product = builder.fmul(factor, strips[v], flags=("contract",))
                    total = builder.fadd(product, builder.load(sums[row, v]), flags=("contract",))
                    builder.store(total, sums[row, v])
        for row in range(rows):
            for v in range(vectors):
                builder.store(builder.load(sums[row, v]), out_place(row, v), align=4)
        return context.get_dummy_value()

    def typing(typingctx, left, left_stride, right, right_stride, count, begin, out, out_stride):
        return types.void(*[types.int64] * 8), codegen

    return intrinsic(typing)


def _passes(bfloat, by_column):
    """A compiled function over any number of rows and columns; returns the columns it did (a multiple of LANES)."""
    wide = [_product(rows, WIDE, bfloat, by_column) for rows in range(1, MAX_ROWS + 1)]
    narrow = [_product(rows, 1, bfloat, by_column) for rows in range(1, MAX_ROWS + 1)]
    wide1, wide2, wide3, wide4 = wide
    narrow1, narrow2, narrow3, narrow4 = narrow

    @njit(error_model="numpy")
    def run(rows, columns, left, left_stride, right, right_stride, count, out, out_stride):
        done = columns // LANES * LANES
        for first in range(0, rows, MAX_ROWS):
            n = min(rows - first, MAX_ROWS)
            a, o = left + 4 * first * left_stride, out + 4 * first * out_stride
            begin = 0
            while begin < done:
                two = begin + LANES * WIDE <= done
                if n == 4:
                    if two:
                        wide4(a, left_stride, right, right_stride, count, begin, o, out_stride)
                    else:
                        narrow4(a, left_stride, right, right_stride, count, begin, o, out_stride)
                elif n == 3:
                    if two:
                        wide3(a, left_stride, right, right_stride, count, begin, o, out_stride)
                    else:
                        narrow3(a, left_stride, right, right_stride, count, begin, o, out_stride)
                elif n == 2:
                    if two:
                        wide2(a, left_stride, right, right_stride, count, begin, o, out_stride)
                    else:
                        narrow2(a, left_stride, right, right_stride, count, begin, o, out_stride)
                elif two:
                    wide1(a, left_stride, right, right_stride, count, begin, o, out_stride)
                else:
                    narrow1(a, left_stride, right, right_stride, count, begin, o, out_stride)
                begin += LANES * WIDE if two else LANES
        return done

    return run


scores_float, scores_bfloat = _passes(False, False), _passes(True, False)
values_float, values_bfloat = _passes(False, True), _passes(True, True)


def _dot_block(rows, columns, bfloat):
    """An intrinsic: out[r, c] = left[r] . right[c] for a few rows and columns; `count` vectors of LANES make a row.

    Arguments (int64): left, its row stride, right, its row stride, count, out, its row stride. Strides count elements.
    """

    def codegen(context, builder, signature, args):
        left, left_stride, right, right_stride, count, out, out_stride = args
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = {(r, c): cgutils.alloca_once_value(builder, zero) for r in range(rows) for c in range(columns)}
        for place in sums.values():
            builder.store(zero, place)
        with cgutils.for_range(builder, count) as loop:
            at = builder.mul(loop.index, ir.Constant(_I64, LANES))

            def index_of(row, stride):
                return builder.add(builder.mul(ir.Constant(_I64, row), stride), at)

            strips = [_load_vector(builder, right, index_of(c, right_stride), bfloat) for c in range(columns)]
            for r in range(rows):
                factor = _load_vector(builder, left, index_of(r, left_stride), False)
                for c in range(columns):
                    product = builder.fmul(factor, strips[c], flags=("contract",))
                    builder.store(builder.fadd(product, builder.load(sums[r, c]), flags=("contract",)), sums[r, c])
        across = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_F32, [_F32, _VECTOR]),
                                                f"llvm.vector.reduce.fadd.v{LANES}f32")
        for (r, c), place in sums.items():
            dot = builder.call(across, [ir.Constant(_F32, 0.0), builder.load(place)], fastmath=("reassoc",))
            index = builder.add(builder.mul(ir.Constant(_I64, r), out_stride), ir.Constant(_I64, c))
            builder.store(dot, builder.gep(_pointer(builder, out, _F32), [index]), align=4)
        return context.get_dummy_value()

    def typing(typingctx, left, left_stride, right, right_stride, count, out, out_stride):
        return types.void(*[types.int64] * 7), codegen

    return intrinsic(typing)


def _dots(bfloat):
    """A compiled function: out[r, c] = left[r] . right[c] over the first values of each; returns how many of them."""
    block2, block1 = _dot_block(MAX_ROWS, WIDE, bfloat), _dot_block(MAX_ROWS, 1, bfloat)
    strip2, strip1 = _dot_block(1, WIDE, bfloat), _dot_block(1, 1, bfloat)
    size = 2 if bfloat else 4

    @njit(error_model="numpy")
    def run(rows, columns, left, left_stride, right, right_stride, width, out, out_stride):
        count = width // LANES
        r = 0
        while r < rows:
            many = r + MAX_ROWS <= rows
            c = 0
            while c < columns:
                two = c + WIDE <= columns
                a, b = left + 4 * r * left_stride, right + size * c * right_stride
                o = out + 4 * (r * out_stride + c)
                if many:
                    if two:
                        block2(a, left_stride, b, right_stride, count, o, out_stride)
                    else:
                        block1(a, left_stride, b, right_stride, count, o, out_stride)
                elif two:
                    strip2(a, left_stride, b, right_stride, count, o, out_stride)
                else:
                    strip1(a, left_stride, b, right_stride, count, o, out_stride)
                c += WIDE if two else 1
            r += MAX_ROWS if many else 1
        return count * LANES

    return run


dots_float, dots_bfloat = _dots(False), _dots(True)
