"""What CPU kernels compute with: views on raw addresses, 16-bit formats as bit patterns, a vectorisable exp.

An array's dtype says its encoding: float32 is itself, uint16 holds bfloat16 bits, int16 holds float16 bits. `load` and
`store` convert; kernels compute in float32. Nothing here knows torch or an operator.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic, overload

# Value changes that vectorising sums needs; NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp"}

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # how callers name an encoding to a kernel


def _cast_intrinsic(result, source, instruction):
    """Arguments are converted to `source` first (numba widens 32-bit integer arithmetic to 64 bits)."""

    def typing(typingctx, value):
        def codegen(context, builder, signature, args):
            return getattr(builder, instruction)(args[0], context.get_value_type(signature.return_type))

        return result(source), codegen

    return intrinsic(typing)


bits_of = _cast_intrinsic(types.uint32, types.float32, "bitcast")  # float32 -> its bits
float_of = _cast_intrinsic(types.float32, types.uint32, "bitcast")  # 32 bits -> float32
double_of = _cast_intrinsic(types.float64, types.int64, "bitcast")  # int64 bits -> float64
_f32_pointer = _cast_intrinsic(types.CPointer(types.float32), types.int64, "inttoptr")
_u16_pointer = _cast_intrinsic(types.CPointer(types.uint16), types.int64, "inttoptr")
_i16_pointer = _cast_intrinsic(types.CPointer(types.int16), types.int64, "inttoptr")
_i32_pointer = _cast_intrinsic(types.CPointer(types.int32), types.int64, "inttoptr")
_i64_pointer = _cast_intrinsic(types.CPointer(types.int64), types.int64, "inttoptr")


@intrinsic
def arguments_of(typingctx, data):
    """The kernel's void* as a pointer to its int64 arguments."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(data), codegen


@njit(inline="always")
def f32(address, shape):
    return carray(_f32_pointer(address), shape)


@njit(inline="always")
def u16(address, shape):
    return carray(_u16_pointer(address), shape)


@njit(inline="always")
def i16(address, shape):
    return carray(_i16_pointer(address), shape)


@njit(inline="always")
def i32(address, shape):
    return carray(_i32_pointer(address), shape)


@njit(inline="always")
def i64(address, shape):
    return carray(_i64_pointer(address), shape)


def load(array, index):
    """array[index] as float32."""
    raise TypeError("compiled code only")


def store(array, index, value):
    """array[index] = value (float32), rounded to nearest even."""
    raise TypeError("compiled code only")


@overload(load, inline="always")
def _load(array, index):
    if array.dtype == types.float32:
        return lambda array, index: array[index]
    if array.dtype == types.uint16:
        return lambda array, index: float_of(types.uint32(array[index]) << types.uint32(16))
    return lambda array, index: half_to_float(array[index])


@overload(store, inline="always")
def _store(array, index, value):
    if array.dtype == types.float32:

        def store_float(array, index, value):
            array[index] = value

        return store_float
    if array.dtype == types.uint16:

        def store_bfloat(array, index, value):
            array[index] = float_to_bfloat(value)

        return store_bfloat

    def store_half(array, index, value):
        array[index] = float_to_half(value)

    return store_half


@njit(inline="always")
def float_to_bfloat(value):
    bits = bits_of(types.float32(value))
    odd = (bits >> types.uint32(16)) & types.uint32(1)
    return types.uint16((bits + types.uint32(0x7FFF) + odd) >> types.uint32(16))


@njit(error_model="numpy", fastmath=False)
def half_to_float(half):
    """float16 bits to float32; exact, subnormals included. Infinity and NaN do not occur in a finite cache."""
    bits = types.uint32(types.uint16(half))
    magnitude = float_of((bits & types.uint32(0x7FFF)) << types.uint32(13)) * np.float32(2.0**112)
    return float_of(bits_of(magnitude) | ((bits & types.uint32(0x8000)) << types.uint32(16)))


@njit(error_model="numpy", fastmath=False)
def float_to_half(value):
    """float32 to float16 bits, nearest even; beyond the range it saturates at 65504."""
    bits = bits_of(types.float32(value))
    sign = (bits >> types.uint32(16)) & types.uint32(0x8000)
    magnitude = min(float_of(bits & types.uint32(0x7FFFFFFF)), np.float32(65504.0))
    whole = bits_of(magnitude)
    if magnitude < np.float32(2.0**-14):  # subnormal: adding 0.5 leaves the rounded mantissa in the low bits
        return types.int16(types.uint16(sign | (bits_of(magnitude + np.float32(0.5)) - types.uint32(0x3F000000))))
    rounded = whole + types.uint32(0xFFF) + ((whole >> types.uint32(13)) & types.uint32(1))
    return types.int16(types.uint16(sign | ((rounded - types.uint32(112 << 23)) >> types.uint32(13))))


@njit(error_model="numpy", fastmath=False)
def exp32(x):
    """exp(x) in float32 to about 2 units in the last place; 0 below -87, saturates above 88. Vectorises."""
    # fastmath=False is said aloud: a caller's setting is inherited otherwise, and simplifies the rounding trick away.
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = x * np.float32(1.4426950408889634) + np.float32(12582912.0)  # 1.5 * 2**23: rounds to an integer
    whole = n - np.float32(12582912.0)
    r = x - whole * np.float32(0.693359375)
    r = r - whole * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    value = p * r * r + r + np.float32(1.0)
    return value * float_of((bits_of(n) << types.uint32(23)) + types.uint32(0x3F800000))


@njit(error_model="numpy", fastmath=False)
def tanh32(x):
    """tanh(x) in float32 to about 3 units in the last place. Vectorises."""
    square = x * x
    p = np.float32(-5.70498872745e-3)
    p = p * square + np.float32(2.06390887954e-2)
    p = p * square + np.float32(-5.37397155531e-2)
    p = p * square + np.float32(1.33314422036e-1)
    p = p * square + np.float32(-3.33332819422e-1)
    small = p * square * x + x
    large = np.float32(1) - np.float32(2) / (exp32(np.float32(2) * abs(x)) + np.float32(1))
    large = large if x > np.float32(0) else -large
    return small if abs(x) < np.float32(0.625) else large


__all__ = [
    "BFLOAT16", "FAST", "FLOAT16", "FLOAT32", "arguments_of", "double_of", "exp32", "f32", "i16", "i32", "i64",
    "load", "store", "tanh32", "u16",
]
