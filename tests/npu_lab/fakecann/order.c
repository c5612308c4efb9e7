/* What is known to have ended when: vector clocks over the host and all streams.
 *
 * Work runs when it is submitted, so a race between streams shows no wrong value here. Instead each submission advances
 * its stream's clock, an event carries the clock of its stream, and a wait takes it over. Work that has to come after
 * other work has it in its clock, or the device might do it first: that is refused. Likewise a copy from pinned host
 * memory may read it until the host knows that it has ended; memory that is written before is noticed then.
 *
 * A stream in which a graph waits for an external event takes no other work: on the device that work would wait too, here
 * it is refused, and waiting for it fails at once instead of after a timeout.
 */
#include <stdlib.h>
#include <string.h>

#include "fake.h"

#define CHECKED_BYTES (1UL << 20) /* longer copies are not looked at: weights, not inputs of a step */

typedef struct pending { /* a copy from pinned memory that may not have run */
    const unsigned char *from;
    size_t bytes;
    uint64_t hash;
    int slot;
    uint32_t tick;
    struct pending *next;
} pending;
typedef struct pinned {
    unsigned char *start;
    size_t bytes;
    struct pinned *next;
} pinned;

static moment host;
static uint32_t ticks[MAX_CLOCKS];
static char taken[MAX_CLOCKS];
static pending *copies;
static pinned *blocks;

int fake_take_clock(void)
{
    for (int slot = 0; slot < MAX_CLOCKS; slot++)
        if (!taken[slot]) {
            taken[slot] = 1;
            return slot;
        }
    return -1;
}

void fake_give_clock(int slot) { taken[slot] = 0; } /* its ticks go on, so what is known of it stays true */

static void merge(moment *into, const moment *other)
{
    for (int i = 0; i < MAX_CLOCKS; i++)
        if (other->at[i] > into->at[i])
            into->at[i] = other->at[i];
}

aclError fake_submit(stream *s)
{
    if (s->waiting)
        return fake_fail(E_SYNC_TIMEOUT, "work on a stream in which a graph waits for an event that nobody recorded");
    if (s->captured || s->updating)
        return OK;
    pthread_mutex_lock(&fake_lock);
    merge(&s->seen, &host);
    s->seen.at[s->slot] = ++ticks[s->slot];
    pthread_mutex_unlock(&fake_lock);
    return OK;
}

void fake_stream_sees(stream *s, const moment *m)
{
    pthread_mutex_lock(&fake_lock);
    merge(&s->seen, m);
    pthread_mutex_unlock(&fake_lock);
}

int fake_after(const moment *m, int slot, uint32_t tick) { return m->at[slot] >= tick; }

static uint64_t hash_of(const unsigned char *p, size_t bytes)
{
    uint64_t hash = 1469598103934665603ULL, word;
    for (; bytes >= sizeof word; p += sizeof word, bytes -= sizeof word) {
        memcpy(&word, p, sizeof word);
        hash = (hash ^ word) * 1099511628211ULL;
    }
    for (; bytes; p++, bytes--)
        hash = (hash ^ *p) * 1099511628211ULL;
    return hash;
}

aclError fake_host_sees(const moment *m)
{
    int written = 0;
    pthread_mutex_lock(&fake_lock);
    merge(&host, m);
    for (pending **at = &copies, *p; (p = *at);) {
        if (host.at[p->slot] < p->tick) {
            at = &p->next;
            continue;
        }
        written |= hash_of(p->from, p->bytes) != p->hash;
        *at = p->next;
        free(p);
    }
    pthread_mutex_unlock(&fake_lock);
    return written ? fake_fail(E_INTERNAL, "pinned memory was written while a copy from it may not have run") : OK;
}

void fake_copy_pending(stream *s, const void *from, size_t bytes)
{
    const unsigned char *start = from;
    if (bytes > CHECKED_BYTES)
        return;
    pthread_mutex_lock(&fake_lock);
    for (pinned *b = blocks; b; b = b->next)
        if (start >= b->start && start + bytes <= b->start + b->bytes) {
            pending *p = malloc(sizeof *p);
            *p = (pending){start, bytes, hash_of(start, bytes), s->slot, s->seen.at[s->slot], copies};
            copies = p;
            break;
        }
    pthread_mutex_unlock(&fake_lock);
}

void fake_pinned(void *start, size_t bytes)
{
    pinned *b = malloc(sizeof *b);
    pthread_mutex_lock(&fake_lock);
    *b = (pinned){start, bytes, blocks};
    blocks = b;
    pthread_mutex_unlock(&fake_lock);
}

void fake_unpinned(void *start)
{
    pthread_mutex_lock(&fake_lock);
    pinned **at = &blocks;
    while (*at && (*at)->start != start)
        at = &(*at)->next;
    pinned *gone = *at;
    if (gone) {
        *at = gone->next;
        for (pending **each = &copies, *p; (p = *each);) {
            int inside = p->from >= gone->start && p->from < gone->start + gone->bytes;
            if (inside) {
                *each = p->next;
                free(p);
            } else {
                each = &p->next;
            }
        }
        free(gone);
    }
    pthread_mutex_unlock(&fake_lock);
}
