/* HCCL between processes of one machine, over a POSIX shared memory file.
 *
 * torch_npu's own ProcessGroupHCCL runs on it: its C++ and Python are the real ones, the transport is not. A stream
 * that captures records its operations as nodes. A rank that waits longer than FAKEHCCL_TIMEOUT (60 s), or finds that
 * another rank asked for something else, sets the communicator's asynchronous error.
 */
#define _GNU_SOURCE
#include "hccl.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"

#define MAX_RANKS 16
#define CHUNK (1UL << 20)   /* bytes a rank shows the others at a time */
#define LETTER (64UL << 10) /* bytes of a message from one rank to another at a time */
typedef struct {
    _Atomic uint32_t full;
    char pad[60];
    uint64_t bytes;
    char data[LETTER];
} letter;
typedef struct {
    _Atomic uint32_t arrived, round; /* of the barrier */
    uint64_t sizes[MAX_RANKS][2 * MAX_RANKS + 1];
    char shown[MAX_RANKS][CHUNK];
    letter box[MAX_RANKS][MAX_RANKS]; /* [from][to] */
} shared;
typedef struct {
    uint32_t ranks, rank;
    shared *mem;
    _Atomic int error;
    char name[COMM_NAME_MAX_LENGTH];
} communicator;

typedef enum {
    ALL_REDUCE,
    ALL_GATHER,
    REDUCE_SCATTER,
    BROADCAST,
    REDUCE_TO,
    SCATTER,
    ALL_TO_ALL,
    MESSAGES,
    BARRIER
} what;
typedef struct {
    HcclSendRecvItem item;
    uint64_t done;
    int finished;
} message;
typedef struct {
    what what;
    const char *from;
    char *to;
    uint64_t count;
    HcclDataType type;
    HcclReduceOp op;
    uint32_t root;
    communicator *comm;
    uint64_t sent[MAX_RANKS], sent_at[MAX_RANKS], received[MAX_RANKS], received_at[MAX_RANKS]; /* elements */
    message *messages;
    uint32_t num_messages;
} job;

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* One turn of a waiting loop; 1: the time is over, and the communicator's error is set. */
static int wait_turn(communicator *c, int *turns, double *began)
{
    if (!*turns)
        *began = seconds();
    if (++*turns > 200)
        usleep(50);
    if (seconds() - *began <= fake_env("FAKEHCCL_TIMEOUT", 60))
        return 0;
    atomic_store(&c->error, HCCL_E_TIMEOUT);
    return 1;
}

static int barrier(communicator *c) /* 1: it failed */
{
    if (atomic_load(&c->error))
        return 1;
    uint32_t round = atomic_load(&c->mem->round);
    if (atomic_fetch_add(&c->mem->arrived, 1) + 1 == c->ranks) {
        atomic_store(&c->mem->arrived, 0);
        atomic_fetch_add(&c->mem->round, 1);
        return 0;
    }
    int turns = 0;
    double began = 0;
    while (atomic_load(&c->mem->round) == round)
        if (wait_turn(c, &turns, &began))
            return 1;
    return 0;
}

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* Every rank shows `bytes` at `from` (NULL: nothing); `take` runs between two barriers. */
#define SHOW(from_, bytes_, ...)                                                                                       \
    do {                                                                                                               \
        const char *shown_ = from_;                                                                                    \
        if (shown_)                                                                                                    \
            memcpy(m->shown[me], shown_, bytes_);                                                                      \
        if (barrier(c))                                                                                                \
            return;                                                                                                    \
        __VA_ARGS__;                                                                                                   \
        if (barrier(c))                                                                                                \
            return;                                                                                                    \
    } while (0)

static void reduce_shown(job *j, char *to, size_t bytes)
{
    shared *m = j->comm->mem;
    memcpy(to, m->shown[0], bytes);
    for (uint32_t rank = 1; rank < j->comm->ranks; rank++)
        fake_reduce(to, m->shown[rank], bytes / fake_element_bytes(j->type), j->type, j->op);
}

static void run_whole(job *j) /* all_reduce, reduce, broadcast, all_gather: one buffer a rank is shown */
{
    communicator *c = j->comm;
    shared *m = c->mem;
    uint32_t me = c->rank;
    size_t total = j->count * fake_element_bytes(j->type);
    for (size_t at = 0; at < total; at += CHUNK) {
        size_t n = smaller(total - at, CHUNK);
        int shows = j->what != BROADCAST || me == j->root;
        SHOW(shows ? j->from + at : NULL, n, {
            if (j->what == ALL_REDUCE || (j->what == REDUCE_TO && me == j->root))
                reduce_shown(j, j->to + at, n);
            if (j->what == BROADCAST && me != j->root)
                memcpy(j->to + at, m->shown[j->root], n);
            for (uint32_t rank = 0; j->what == ALL_GATHER && rank < c->ranks; rank++)
                memcpy(j->to + rank * total + at, m->shown[rank], n);
        });
    }
}

static void run_parts(job *j) /* reduce_scatter, scatter: a part for each rank is shown in turn */
{
    communicator *c = j->comm;
    shared *m = c->mem;
    uint32_t me = c->rank;
    size_t part = j->count * fake_element_bytes(j->type);
    for (uint32_t target = 0; target < c->ranks; target++)
        for (size_t at = 0; at < part; at += CHUNK) {
            size_t n = smaller(part - at, CHUNK);
            int shows = j->what == REDUCE_SCATTER || me == j->root;
            SHOW(shows ? j->from + target * part + at : NULL, n, {
                if (target == me && j->what == REDUCE_SCATTER)
                    reduce_shown(j, j->to + at, n);
                if (target == me && j->what == SCATTER)
                    memcpy(j->to + at, m->shown[j->root], n);
            });
        }
}

static void run_all_to_all(job *j)
{
    communicator *c = j->comm;
    shared *m = c->mem;
    uint32_t me = c->rank;
    size_t element = fake_element_bytes(j->type);
    uint64_t total = 0, longest = 0;
    int mismatch = 0;
    for (uint32_t rank = 0; rank < c->ranks; rank++) {
        m->sizes[me][rank] = j->sent[rank] * element;
        m->sizes[me][MAX_RANKS + rank] = j->sent_at[rank] * element;
        uint64_t end = (j->sent_at[rank] + j->sent[rank]) * element;
        total = end > total ? end : total;
    }
    m->sizes[me][2 * MAX_RANKS] = total;
    if (barrier(c))
        return;
    for (uint32_t rank = 0; rank < c->ranks; rank++) {
        uint64_t bytes = m->sizes[rank][2 * MAX_RANKS];
        longest = bytes > longest ? bytes : longest;
        mismatch |= m->sizes[rank][me] != j->received[rank] * element;
    }
    for (uint64_t at = 0; at < longest; at += CHUNK)
        SHOW(at < total ? j->from + at : NULL, smaller(total - at, CHUNK), {
            for (uint32_t rank = 0; rank < c->ranks && !mismatch; rank++) {
                uint64_t begin = m->sizes[rank][MAX_RANKS + me], end = begin + m->sizes[rank][me];
                uint64_t low = begin > at ? begin : at, high = smaller(end, at + CHUNK);
                if (low < high)
                    memcpy(j->to + j->received_at[rank] * element + (low - begin), m->shown[rank] + (low - at),
                           high - low);
            }
        });
    if (!barrier(c) && mismatch)
        atomic_store(&c->error, HCCL_E_PARA);
}

static int same_way(message *a, message *b)
{
    return a->item.sendRecvType == b->item.sendRecvType && a->item.remoteRank == b->item.remoteRank;
}

/* Moves one letter of a message if its box allows; 1: it did. */
static int advance(communicator *c, message *x)
{
    int sends = x->item.sendRecvType == HCCL_SEND;
    uint32_t peer = x->item.remoteRank;
    letter *box = sends ? &c->mem->box[c->rank][peer] : &c->mem->box[peer][c->rank];
    if ((int)atomic_load(&box->full) == sends)
        return 0;
    uint64_t total = x->item.count * fake_element_bytes(x->item.dataType);
    uint64_t n = smaller(total - x->done, LETTER);
    char *at = (char *)x->item.buf + x->done;
    if (sends) {
        memcpy(box->data, at, n);
        box->bytes = n;
    } else {
        if (box->bytes != n)
            atomic_store(&c->error, HCCL_E_PARA);
        memcpy(at, box->data, smaller(n, box->bytes));
    }
    atomic_store(&box->full, sends);
    x->done += n;
    x->finished = x->done == total;
    return 1;
}

static void run_messages(job *j) /* each advances as far as its peer lets it, in order between two ranks */
{
    double began = 0;
    uint32_t left = j->num_messages;
    int turns = 0;
    for (uint32_t i = 0; i < j->num_messages; i++)
        j->messages[i].done = j->messages[i].finished = 0;
    while (left) {
        int moved = 0;
        for (uint32_t i = 0; i < j->num_messages; i++) {
            message *x = &j->messages[i];
            int waits = x->finished;
            for (uint32_t k = 0; k < i && !waits; k++)
                waits = !j->messages[k].finished && same_way(&j->messages[k], x);
            if (waits || !advance(j->comm, x))
                continue;
            moved = 1;
            left -= x->finished;
        }
        if (moved)
            turns = 0;
        else if (wait_turn(j->comm, &turns, &began))
            return;
    }
}

static void run(void *argument)
{
    job *j = argument;
    switch (j->what) {
    case BARRIER:
        barrier(j->comm);
        break;
    case MESSAGES:
        run_messages(j);
        break;
    case ALL_TO_ALL:
        run_all_to_all(j);
        break;
    case REDUCE_SCATTER:
    case SCATTER:
        run_parts(j);
        break;
    default:
        run_whole(j);
    }
}

static void discard(void *argument)
{
    free(((job *)argument)->messages);
    free(argument);
}

static HcclResult post(job wanted, aclrtStream s)
{
    if (!wanted.comm)
        return HCCL_E_PTR;
    int error = atomic_load(&wanted.comm->error);
    if (error)
        return error;
    job *j = malloc(sizeof *j);
    *j = wanted;
    if (fake_submit(fake_stream(s)))
        return HCCL_E_RUNTIME;
    node x = {.kind = NODE_HOST, .function = run, .to = j, .from = j->comm, .release = discard};
    if (!fake_record(fake_stream(s), x)) {
        run(j);
        discard(j);
    }
    return HCCL_SUCCESS;
}

/* ---- communicators ---- */

HcclResult HcclGetRootInfo(HcclRootInfo *info)
{
    uint64_t random[2];
    memset(info, 0, sizeof *info);
    int fd = open("/dev/urandom", O_RDONLY);
    ssize_t got = read(fd, random, sizeof random);
    close(fd);
    if (got != sizeof random)
        return HCCL_E_SYSCALL;
    snprintf(info->internal, sizeof info->internal, "/fakehccl-%016lx%016lx", random[0], random[1]);
    return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo *info, uint32_t rank, HcclComm *out)
{
    if (ranks > MAX_RANKS || rank >= ranks)
        return HCCL_E_PARA;
    if (fake_capturing_total) /* it takes memory and waits for the device */
        return fake_fail(E_CAPTURE_MODE, "a communicator is made while a stream captures"), HCCL_E_RUNTIME;
    int fd = shm_open(info->internal, O_CREAT | O_RDWR, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(shared)))
        return HCCL_E_SYSCALL;
    communicator *c = calloc(1, sizeof *c);
    c->ranks = ranks;
    c->rank = rank;
    snprintf(c->name, sizeof c->name, "%s", info->internal + 1);
    c->mem = mmap(NULL, sizeof(shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (c->mem == MAP_FAILED)
        return HCCL_E_MEMORY;
    int failed = barrier(c);
    if (!rank)
        shm_unlink(info->internal);
    *out = c;
    return failed ? HCCL_E_TIMEOUT : HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo *info, uint32_t rank,
                                      const HcclCommConfig *config, HcclComm *out)
{
    HcclResult error = HcclCommInitRootInfo(ranks, info, rank, out);
    if (!error && config && config->hcclCommName[0])
        memcpy(((communicator *)*out)->name, config->hcclCommName, COMM_NAME_MAX_LENGTH);
    return error;
}

uint32_t HcclGetCommConfigCapability(void) { return HCCL_COMM_CONFIG_COMM_NAME + 1; }

HcclResult HcclCommDestroy(HcclComm handle)
{
    munmap(((communicator *)handle)->mem, sizeof(shared));
    free(handle);
    return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm handle, char *name)
{
    strcpy(name, ((communicator *)handle)->name);
    return HCCL_SUCCESS;
}

HcclResult HcclGetRankSize(HcclComm handle, uint32_t *ranks)
{
    *ranks = ((communicator *)handle)->ranks;
    return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm handle, uint32_t *rank)
{
    *rank = ((communicator *)handle)->rank;
    return HCCL_SUCCESS;
}

HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult *error)
{
    *error = atomic_load(&((communicator *)handle)->error);
    return HCCL_SUCCESS;
}

/* ---- operations: [count] elements of `type` from `from` to `to` ---- */

HcclResult HcclAllReduce(void *from, void *to, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm c,
                         aclrtStream s)
{
    return post((job){ALL_REDUCE, from, to, count, type, op, .comm = c}, s);
}

HcclResult HcclReduce(void *from, void *to, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm c, aclrtStream s)
{
    return post((job){REDUCE_TO, from, to, count, type, op, root, c}, s);
}

HcclResult HcclAllGather(void *from, void *to, uint64_t count, HcclDataType type, HcclComm c, aclrtStream s)
{
    return post((job){ALL_GATHER, from, to, count, type, .comm = c}, s);
}

HcclResult HcclReduceScatter(void *from, void *to, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm c,
                             aclrtStream s)
{
    return post((job){REDUCE_SCATTER, from, to, count, type, op, .comm = c}, s);
}

HcclResult HcclBroadcast(void *buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm c, aclrtStream s)
{
    return post((job){BROADCAST, buffer, buffer, count, type, .root = root, .comm = c}, s);
}

HcclResult HcclScatter(void *from, void *to, uint64_t count, HcclDataType type, uint32_t root, HcclComm c,
                       aclrtStream s)
{
    return post((job){SCATTER, from, to, count, type, .root = root, .comm = c}, s);
}

HcclResult HcclBarrier(HcclComm c, aclrtStream s) { return post((job){.what = BARRIER, .comm = c}, s); }

HcclResult HcclAlltoAllV(const void *from, const void *sent, const void *sent_at, HcclDataType type, const void *to,
                         const void *received, const void *received_at, HcclDataType other, HcclComm handle,
                         aclrtStream s)
{
    communicator *c = handle;
    if (type != other)
        return HCCL_E_PARA;
    job j = {ALL_TO_ALL, from, (char *)to, .type = type, .comm = c};
    memcpy(j.sent, sent, 8 * c->ranks);
    memcpy(j.sent_at, sent_at, 8 * c->ranks);
    memcpy(j.received, received, 8 * c->ranks);
    memcpy(j.received_at, received_at, 8 * c->ranks);
    return post(j, s);
}

HcclResult HcclAlltoAll(const void *from, uint64_t sent, HcclDataType type, const void *to, uint64_t received,
                        HcclDataType other, HcclComm handle, aclrtStream s)
{
    communicator *c = handle;
    if (type != other || sent != received)
        return HCCL_E_PARA;
    job j = {ALL_TO_ALL, from, (char *)to, .type = type, .comm = c};
    for (uint32_t rank = 0; rank < c->ranks; rank++) {
        j.sent[rank] = j.received[rank] = sent;
        j.sent_at[rank] = j.received_at[rank] = rank * sent;
    }
    return post(j, s);
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t count, HcclComm c, aclrtStream s)
{
    message *messages = calloc(count, sizeof *messages);
    for (uint32_t i = 0; i < count; i++)
        messages[i].item = items[i];
    return post((job){.what = MESSAGES, .comm = c, .messages = messages, .num_messages = count}, s);
}

HcclResult HcclSend(void *buffer, uint64_t count, HcclDataType type, uint32_t to, HcclComm c, aclrtStream s)
{
    HcclSendRecvItem item = {HCCL_SEND, buffer, count, type, to};
    return HcclBatchSendRecv(&item, 1, c, s);
}

HcclResult HcclRecv(void *buffer, uint64_t count, HcclDataType type, uint32_t from, HcclComm c, aclrtStream s)
{
    HcclSendRecvItem item = {HCCL_RECV, buffer, count, type, from};
    return HcclBatchSendRecv(&item, 1, c, s);
}
