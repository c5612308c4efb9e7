/* Virtual memory: reserved ranges, physical pages (memfd), mappings, handles for other processes.
 *
 * A page is mapped whole at offset 0, as every known caller does; one page may be mapped at several addresses.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake.h"

/* Its file is longer by a list of the processes that may import it, which only the exporter writes. */
typedef struct {
    int32_t count, pids[63];
} importers;
typedef struct physical {
    int fd, device, imported, exported;
    size_t bytes;
    struct physical *next; /* of those that are exported */
} physical;
static physical *exported;
typedef struct range {
    char *start;
    size_t bytes;
    struct range *next;
} range;
static range *reserved, *mapped;

static void add(range **list, char *start, size_t bytes)
{
    range *r = malloc(sizeof *r);
    *r = (range){.start = start, .bytes = bytes, .next = *list};
    *list = r;
}

static size_t take(range **list, char *start) /* its bytes; 0: not in the list */
{
    for (range **at = list; *at; at = &(*at)->next)
        if ((*at)->start == start) {
            range *r = *at;
            size_t bytes = r->bytes;
            *at = r->next;
            free(r);
            return bytes;
        }
    return 0;
}

aclError aclrtReserveMemAddress(void **out, size_t bytes, size_t, void *, uint64_t)
{
    if (!bytes)
        return fake_fail(E_PARAM, "reserve of 0 bytes");
    bytes = (bytes + PAGE - 1) & ~(PAGE - 1); /* torch_npu probes support with 512 bytes: the runtime rounds up */
    char *raw = mmap(NULL, bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED)
        return E_OUT_OF_MEMORY;
    char *start = (char *)(((uintptr_t)raw + PAGE - 1) & ~(PAGE - 1));
    if (start > raw)
        munmap(raw, start - raw);
    munmap(start + bytes, raw + PAGE - start);
    pthread_mutex_lock(&fake_lock);
    add(&reserved, start, bytes);
    pthread_mutex_unlock(&fake_lock);
    *out = start;
    return OK;
}

aclError aclrtReleaseMemAddress(void *start)
{
    pthread_mutex_lock(&fake_lock);
    size_t bytes = take(&reserved, start);
    int used = 0;
    for (range *r = mapped; r; r = r->next)
        used |= r->start >= (char *)start && r->start < (char *)start + bytes;
    if (used)
        add(&reserved, start, bytes);
    pthread_mutex_unlock(&fake_lock);
    if (!bytes || used)
        return fake_fail(E_PARAM, "release of %p, which is not reserved or in use", start);
    munmap(start, bytes);
    return OK;
}

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *, aclrtMemGranularityOptions, size_t *bytes)
{
    *bytes = PAGE;
    return OK;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *out, size_t bytes, const aclrtPhysicalMemProp *properties,
                             uint64_t flags)
{
    if (!bytes || bytes % PAGE || flags)
        return fake_fail(E_PARAM, "physical size %zu is no multiple of 2 MiB, or flags are not 0", bytes);
    int on_device = properties->location.type == ACL_MEM_LOCATION_TYPE_DEVICE;
    int device = on_device ? (int)properties->location.id : -1;
    if (device >= fake_device_count())
        return E_DEVICE;
    pthread_mutex_lock(&fake_lock);
    int fits = device < 0 || fake_used[device] + bytes <= fake_device_bytes();
    if (fits && device >= 0)
        fake_used[device] += bytes;
    if (fits)
        fake_counters.physical_bytes_live += bytes;
    pthread_mutex_unlock(&fake_lock);
    if (!fits)
        return fake_fail(E_OUT_OF_MEMORY, "out of fake physical memory (%zu)", bytes);
    physical *page = calloc(1, sizeof *page);
    *page = (physical){.fd = memfd_create("fakecann", 0), .device = device, .bytes = bytes};
    if (page->fd < 0 || ftruncate(page->fd, bytes + sizeof(importers)))
        return E_OUT_OF_MEMORY;
    *out = page;
    return OK;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle)
{
    physical *page = handle;
    pthread_mutex_lock(&fake_lock);
    for (physical **at = &exported; *at; at = &(*at)->next)
        if (*at == page) {
            *at = page->next;
            break;
        }
    if (!page->imported) {
        if (page->device >= 0)
            fake_used[page->device] -= page->bytes;
        fake_counters.physical_bytes_live -= page->bytes;
    }
    pthread_mutex_unlock(&fake_lock);
    close(page->fd);
    free(page);
    return OK;
}

static aclError map(char *start, size_t bytes, int fd)
{
    int inside = 0;
    for (range *r = reserved; r; r = r->next)
        inside |= start >= r->start && start + bytes <= r->start + r->bytes;
    if (!inside)
        return fake_fail(E_PARAM, "map outside a reservation");
    for (range *r = mapped; r; r = r->next)
        if (start < r->start + r->bytes && r->start < start + bytes)
            return fake_fail(E_PARAM, "range already mapped");
    if (mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        return E_OUT_OF_MEMORY;
    add(&mapped, start, bytes);
    fake_counters.mappings_live++;
    return OK;
}

aclError aclrtMapMem(void *start, size_t bytes, size_t offset, aclrtDrvMemHandle handle, uint64_t flags)
{
    physical *page = handle;
    if (flags || offset || bytes != page->bytes)
        return fake_fail(E_PARAM, "bad map size %zu offset %zu", bytes, offset);
    pthread_mutex_lock(&fake_lock);
    aclError error = map(start, bytes, page->fd);
    pthread_mutex_unlock(&fake_lock);
    return error;
}

aclError aclrtUnmapMem(void *start)
{
    pthread_mutex_lock(&fake_lock);
    size_t bytes = take(&mapped, start);
    fake_counters.mappings_live -= bytes > 0;
    pthread_mutex_unlock(&fake_lock);
    if (!bytes)
        return fake_fail(E_PARAM, "unmap of %p, which is not mapped", start);
    mmap(start, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return OK;
}

/* A handle that another process of the same user can open: process number and file descriptor. */
aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, aclrtMemHandleType type, uint64_t flags,
                                         uint64_t *out)
{
    physical *page = handle;
    importers list = {.count = flags ? -1 : 0}; /* flag 1: anybody may import it */
    if (type != ACL_MEM_HANDLE_TYPE_NONE || flags > 1 || page->imported || page->exported)
        return fake_fail(E_PARAM, "export: of another process's page, a second time, or with flags unknown");
    if (pwrite(page->fd, &list, sizeof list, page->bytes) != sizeof list)
        return E_INTERNAL;
    pthread_mutex_lock(&fake_lock);
    page->exported = 1;
    page->next = exported;
    exported = page;
    pthread_mutex_unlock(&fake_lock);
    *out = ((uint64_t)getpid() << 32) | (uint32_t)page->fd;
    return OK;
}

aclError aclrtMemSetPidToShareableHandle(uint64_t shared, int32_t *pids, size_t count)
{
    importers list = {0};
    pthread_mutex_lock(&fake_lock);
    physical *page = exported;
    while (page && (int)(shared >> 32) == getpid() && page->fd != (int)(uint32_t)shared)
        page = page->next;
    pthread_mutex_unlock(&fake_lock);
    if (!page || (int)(shared >> 32) != getpid() || count > 63)
        return fake_fail(E_PARAM, "process numbers for a handle that this process has not exported");
    list.count = (int32_t)count;
    memcpy(list.pids, pids, count * sizeof *pids);
    return pwrite(page->fd, &list, sizeof list, page->bytes) == sizeof list ? OK : E_INTERNAL;
}

static int may_import(int fd, off_t at)
{
    importers list;
    if (pread(fd, &list, sizeof list, at) != sizeof list)
        return 0;
    if (list.count < 0)
        return 1;
    for (int i = 0; i < list.count; i++)
        if (list.pids[i] == getpid())
            return 1;
    return 0;
}

aclError aclrtMemImportFromShareableHandle(uint64_t shared, int32_t device, aclrtDrvMemHandle *out)
{
    char path[64];
    struct stat found;
    if ((int)(shared >> 32) == getpid())
        return fake_fail(E_PARAM, "import in the process that exports");
    snprintf(path, sizeof path, "/proc/%u/fd/%u", (unsigned)(shared >> 32), (unsigned)shared);
    int fd = open(path, O_RDWR);
    if (fd < 0 || fstat(fd, &found))
        return fake_fail(E_PARAM, "import: %s: %s", path, strerror(errno));
    off_t bytes = found.st_size - (off_t)sizeof(importers);
    if (!may_import(fd, bytes)) {
        close(fd);
        return fake_fail(E_PERMISSION, "import: this process is not on the page's list");
    }
    physical *page = calloc(1, sizeof *page);
    *page = (physical){.fd = fd, .device = device, .bytes = bytes, .imported = 1};
    *out = page;
    return OK;
}
