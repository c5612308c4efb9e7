/* Element sizes and reductions of the fake HCCL; 16-bit floats are reduced in float and rounded to nearest even. */
#include <math.h>
#include <string.h>

#include "hccl.h"

size_t fake_element_bytes(HcclDataType type)
{
    switch (type) {
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_BFP16:
        return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_FP32:
    case HCCL_DATA_TYPE_UINT32:
        return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
        return 8;
    case HCCL_DATA_TYPE_INT128:
        return 16;
    default:
        return 1;
    }
}

/* By hand: compilers have _Float16 on every processor only since gcc 12. */
static float half_to_float(uint16_t bits)
{
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value = exponent == 0    ? ldexpf((float)mantissa, -24)
                  : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                   : ldexpf((float)(1024 + mantissa), exponent - 25);
    return bits & 0x8000 ? -value : value;
}

static uint16_t float_to_half(float value)
{
    uint32_t bits;
    float size = fabsf(value);
    memcpy(&bits, &size, 4);
    uint16_t half = isnan(value)       ? 0x7e00
                    : size >= 65520.0f ? 0x7c00 /* the first that rounds to more than the largest half */
                    : size < 0x1p-14f  ? (uint16_t)nearbyintf(ldexpf(size, 24))
                                       : (uint16_t)(((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10));
    return half | (signbit(value) ? 0x8000 : 0);
}

static float bfloat_to_float(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t float_to_bfloat(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define COMBINE(a, b)                                                                                                  \
    (op == HCCL_REDUCE_SUM    ? (a) + (b)                                                                              \
     : op == HCCL_REDUCE_PROD ? (a) * (b)                                                                              \
     : op == HCCL_REDUCE_MAX  ? ((a) > (b) ? (a) : (b))                                                                \
                              : ((a) < (b) ? (a) : (b)))
#define REDUCE(T)                                                                                                      \
    for (size_t i = 0; i < count; i++)                                                                                 \
        ((T *)to)[i] = (T)COMBINE(((T *)to)[i], ((const T *)from)[i]);                                                 \
    break
#define REDUCE_SHORT(widen, narrow)                                                                                    \
    for (size_t i = 0; i < count; i++) {                                                                               \
        float a = widen(((uint16_t *)to)[i]), b = widen(((const uint16_t *)from)[i]);                                  \
        ((uint16_t *)to)[i] = narrow(COMBINE(a, b));                                                                   \
    }                                                                                                                  \
    break

void fake_reduce(void *to, const void *from, size_t count, HcclDataType type, HcclReduceOp op)
{
    switch (type) {
    case HCCL_DATA_TYPE_FP32:
        REDUCE(float);
    case HCCL_DATA_TYPE_FP64:
        REDUCE(double);
    case HCCL_DATA_TYPE_INT8:
        REDUCE(int8_t);
    case HCCL_DATA_TYPE_UINT8:
        REDUCE(uint8_t);
    case HCCL_DATA_TYPE_INT16:
        REDUCE(int16_t);
    case HCCL_DATA_TYPE_INT32:
        REDUCE(int32_t);
    case HCCL_DATA_TYPE_INT64:
        REDUCE(int64_t);
    case HCCL_DATA_TYPE_FP16:
        REDUCE_SHORT(half_to_float, float_to_half);
    case HCCL_DATA_TYPE_BFP16:
        REDUCE_SHORT(bfloat_to_float, float_to_bfloat);
    default:
        break;
    }
}
