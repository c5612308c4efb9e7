/* What native code made from linalg calls: MLIR's strided copy, and the bf16 rounding that old compilers' libraries
 * lack. */
#include <stdint.h>
#include <string.h>

struct unranked {
    int64_t rank;
    void *descriptor; /* {allocated, aligned, offset, sizes[rank], strides[rank]} */
};

struct view {
    char *data;
    int64_t rank, *sizes, *strides;
};

static struct view view_of(int64_t element, const struct unranked *memref) {
    int64_t *fields = memref->descriptor;
    struct view found = {(char *)fields[1] + fields[2] * element, memref->rank, fields + 3, fields + 3 + memref->rank};
    return found;
}

static void copy(int64_t element, struct view *from, struct view *to, int64_t axis, char *source, char *target) {
    if (axis == from->rank) {
        memcpy(target, source, element);
        return;
    }
    int64_t count = from->sizes[axis];
    if (axis == from->rank - 1 && from->strides[axis] == 1 && to->strides[axis] == 1) {
        memmove(target, source, count * element);
        return;
    }
    for (int64_t i = 0; i < count; i++)
        copy(element, from, to, axis + 1, source + i * from->strides[axis] * element,
             target + i * to->strides[axis] * element);
}

void memrefCopy(int64_t element, struct unranked *source, struct unranked *target) {
    struct view from = view_of(element, source), to = view_of(element, target);
    for (int64_t axis = 0; axis < from.rank; axis++)
        if (from.sizes[axis] == 0)
            return;
    copy(element, &from, &to, 0, from.data, to.data);
}

/* The result travels in a vector register, where the caller takes its low 16 bits. */
float __truncsfbf2(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = value != value ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    memcpy(&value, &bits, 4);
    return value;
}
