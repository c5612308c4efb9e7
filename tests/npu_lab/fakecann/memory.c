/* Device and host allocations, copies and fills. */
#include <stdlib.h>
#include <string.h>

#include "fake.h"

typedef struct block {
    void *address;
    size_t bytes;
    int device;
    struct block *next;
} block;
static block *blocks[4096]; /* by a hash of the address */

static block **bucket(void *p) { return &blocks[(unsigned)(((uintptr_t)p >> 9) * 2654435761u) & 4095]; }

aclError aclrtMalloc(void **out, size_t bytes, aclrtMemMallocPolicy)
{
    int device = fake_current_device();
    if (device < 0)
        return fake_fail(E_CONTEXT, "no device set");
    if (!bytes)
        return E_PARAM;
    void *p = NULL;
    pthread_mutex_lock(&fake_lock);
    int fits = fake_used[device] + bytes <= fake_device_bytes();
    if (!fits || posix_memalign(&p, bytes >= PAGE ? PAGE : 512, bytes + 32)) {
        pthread_mutex_unlock(&fake_lock);
        return fake_fail(E_OUT_OF_MEMORY, "out of fake device memory (%zu)", bytes);
    }
    block *b = malloc(sizeof *b);
    *b = (block){.address = p, .bytes = bytes, .device = device, .next = *bucket(p)};
    *bucket(p) = b;
    fake_used[device] += bytes;
    fake_counters.malloc_calls++;
    fake_counters.malloc_bytes_live += bytes;
    pthread_mutex_unlock(&fake_lock);
    *out = p;
    return OK;
}

aclError aclrtMallocAlign32(void **out, size_t bytes, aclrtMemMallocPolicy policy)
{
    return aclrtMalloc(out, bytes, policy);
}

aclError aclrtFree(void *p)
{
    pthread_mutex_lock(&fake_lock);
    block **at = bucket(p);
    while (*at && (*at)->address != p)
        at = &(*at)->next;
    block *b = *at;
    if (b) {
        *at = b->next;
        fake_used[b->device] -= b->bytes;
        fake_counters.malloc_bytes_live -= b->bytes;
    }
    pthread_mutex_unlock(&fake_lock);
    if (!b)
        return fake_fail(E_PARAM, "free of unknown device pointer %p", p);
    free(b);
    free(p);
    return OK;
}

aclError aclrtMallocHost(void **out, size_t bytes)
{
    if (posix_memalign(out, 64, bytes ? bytes : 1))
        return E_OUT_OF_MEMORY;
    fake_pinned(*out, bytes);
    return OK;
}

aclError aclrtMallocHostWithCfg(void **out, uint64_t bytes, aclrtMallocConfig *) { return aclrtMallocHost(out, bytes); }

aclError aclrtFreeHost(void *p)
{
    fake_unpinned(p);
    free(p);
    return OK;
}

void fake_copy(void *to, const void *from, size_t bytes, aclrtMemcpyKind direction)
{
    memmove(to, from, bytes);
    fake_counters.memcpy_calls++;
    if (direction == ACL_MEMCPY_HOST_TO_DEVICE)
        fake_counters.h2d_bytes += bytes;
    if (direction == ACL_MEMCPY_DEVICE_TO_HOST) {
        fake_counters.d2h_bytes += bytes;
        fake_counters.d2h_calls++;
    }
}

aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, aclrtMemcpyKind direction)
{
    if (bytes > room)
        return fake_fail(E_PARAM, "memcpy of %zu bytes into %zu", bytes, room);
    fake_copy(to, from, bytes, direction);
    return OK;
}

aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, aclrtMemcpyKind direction,
                          aclrtStream s)
{
    if (bytes > room)
        return fake_fail(E_PARAM, "memcpyAsync of %zu bytes into %zu", bytes, room);
    aclError error = fake_submit(fake_stream(s));
    if (error)
        return error;
    node x = {.kind = NODE_MEMCPY, .to = to, .from = from, .bytes = bytes, .direction = direction};
    if (!fake_record(fake_stream(s), x)) {
        fake_copy(to, from, bytes, direction);
        if (direction == ACL_MEMCPY_HOST_TO_DEVICE)
            fake_copy_pending(fake_stream(s), from, bytes);
    }
    return OK;
}

aclError aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t bytes, aclrtMemcpyKind direction,
                                       aclrtStream s)
{
    return aclrtMemcpyAsync(to, room, from, bytes, direction, s);
}

aclError aclrtMemset(void *p, size_t room, int32_t value, size_t bytes)
{
    if (bytes > room)
        return fake_fail(E_PARAM, "memset of %zu bytes in %zu", bytes, room);
    fake_forget_cell(p);
    memset(p, value, bytes);
    return OK;
}

aclError aclrtMemsetAsync(void *p, size_t room, int32_t value, size_t bytes, aclrtStream s)
{
    node x = {.kind = NODE_MEMSET, .to = p, .value = value, .bytes = bytes};
    aclError error = fake_submit(fake_stream(s));
    if (error)
        return error;
    if (bytes <= room && fake_record(fake_stream(s), x))
        return OK;
    return aclrtMemset(p, room, value, bytes);
}
