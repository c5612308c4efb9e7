/* What the files of the fake AscendCL runtime share.
 *
 * "Device" memory is host memory, a stream runs its work at once on the calling thread, and an ACL graph records nodes
 * and replays them. What the device might do in another order is found by clocks (order.c). A stock torch_npu wheel then creates tensors, copies, uses streams, events and virtual memory, and
 * captures graphs, on a machine without CANN. Nothing is computed here: the kernels are Python's (site/npu_emulator),
 * which records its operators as nodes through fakecann_record_node().
 *
 * Environment: FAKECANN_DEVICES (1), FAKECANN_MEM_MB (4096 a device), FAKECANN_STREAMS (2048 a device), FAKECANN_SOC (Ascend910B3), FAKECANN_STRICT (1:
 * refuse what the runtime refuses while a stream captures), FAKECANN_TRACE (0; 1: errors, 2: torch_npu's log too).
 */
#ifndef FAKE_H
#define FAKE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "acl/acl_rt.h"

#define OK ACL_SUCCESS
#define E_PARAM 107000
#define E_DEVICE 107001
#define E_CONTEXT 107002
#define E_STREAM_CAPTURED 107027
#define E_EVENT_CAPTURED 107028
#define E_NOT_CAPTURED 107029
#define E_CAPTURE_MODE 107030
#define E_DEFAULT_STREAM 107031
#define E_OUT_OF_MEMORY 207001
#define E_PERMISSION 207006
#define E_TASK_UPDATE 207019
#define E_CAPTURE_INVALID 507903
#define E_NO_KERNEL 207000
#define E_NO_STREAM 207008
#define E_INTERNAL 507000
#define E_SYNC_TIMEOUT 507046

#define PAGE (2UL << 20) /* the granularity of physical memory */
#define MAX_DEVICES 16
#define MAX_CLOCKS 256

typedef struct { /* by stream: how much of its work has ended at the latest now */
    uint32_t at[MAX_CLOCKS];
} moment;
typedef struct {
    uint64_t nanoseconds;
    uint32_t flags;
    struct graph *captured; /* recorded inside this capture */
    int graph_id;           /* of `captured`, which may be gone */
    moment seen;            /* of its stream when it was recorded */
} event;
typedef struct cell { /* a word of device memory that streams write and wait for; so are torch_npu's external events */
    uint64_t *address;
    moment seen;   /* of the stream outside of graphs that wrote it last */
    int slot;      /* where a graph wrote it last, */
    uint32_t tick; /* and when; 0: never */
    struct cell *next;
} cell;

/* A node of a graph; also what a stream would otherwise have run at once. */
typedef enum { NODE_MEMCPY, NODE_MEMSET, NODE_OPERATOR, NODE_HOST, NODE_WAIT, NODE_WRITE } node_kind;
typedef struct {
    node_kind kind;
    void *to; /* NODE_WAIT, NODE_WRITE: the cell, `bytes` the value */
    const void *from; /* NODE_HOST: the communicator, if it is a collective */
    size_t bytes;
    int32_t value;
    uint64_t operator_id;    /* Python's number of a recorded operator */
    aclrtHostFunc function;  /* NODE_HOST: called with `to` */
    void (*release)(void *); /* NODE_HOST: frees `to` when the graph or the node goes */
    aclrtMemcpyKind direction;
} node;
typedef struct graph {
    node *nodes;
    int count, capacity, id, ended, device;
    int streams; /* that the device keeps for it */
    struct group *groups;
} graph;
typedef struct group { /* a task group: nodes[first, last) of a graph, which an update replaces */
    graph *of;
    int first, last, updated;
    int run_slot, update_slot;
    uint32_t run_tick, update_tick; /* the latest, 0: never */
    struct group *next;
} group;
typedef struct stream {
    int id, device, invalid;
    graph *captured; /* what it captures into, or NULL */
    group *open, *updating;
    int slot; /* in clocks */
    moment seen;
    graph *waiting; /* runs in it and waits for a cell at node `position` */
    int position;
    struct stream *next;
} stream;

/* Counters that a test can read; the Python side has the same fields in the same order (npu_emulator/counters.py). */
typedef struct {
    uint64_t malloc_calls, malloc_bytes_live, physical_bytes_live, mappings_live, streams_live, events_live,
        graphs_live, memcpy_calls, h2d_bytes, d2h_bytes, d2h_calls, syncs, graph_launches, task_updates;
} counters;

extern pthread_mutex_t fake_lock; /* guards everything below and the lists of memory.c, vmm.c and stream.c */
extern counters fake_counters;
extern size_t fake_used[MAX_DEVICES]; /* bytes of each device in use */
extern int fake_capturing_total;      /* streams that began a capture and have not ended it */

long fake_env(const char *name, long fallback);
int fake_device_count(void);
size_t fake_device_bytes(void);
int fake_strict(void);
int fake_current_device(void); /* -1: none selected */
aclError fake_fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));

stream *fake_stream(aclrtStream handle); /* the default stream for NULL */
stream *fake_streams(void);              /* all that were created */
int fake_record(stream *s, node x);      /* 1: recorded, or put into the task group being updated; 0: run it now */
int fake_streams_left(int device);
aclError fake_resume(const cell *c);     /* the graphs that wait for it go on */
void fake_forget_cell(void *address);
aclError fake_refuse_in_capture(stream *s, const char *what); /* an error, and the capture is invalid */
void fake_copy(void *to, const void *from, size_t bytes, aclrtMemcpyKind direction);

/* order.c */
int fake_take_clock(void); /* -1: all are in use */
void fake_give_clock(int slot);
aclError fake_submit(stream *s); /* before all work given to a stream */
void fake_stream_sees(stream *s, const moment *m);
aclError fake_host_sees(const moment *m);
int fake_after(const moment *m, int slot, uint32_t tick);
void fake_copy_pending(stream *s, const void *from, size_t bytes);
void fake_pinned(void *start, size_t bytes);
void fake_unpinned(void *start);

#endif
