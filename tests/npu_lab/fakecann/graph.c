/* ACL graphs: capture of a stream into nodes, replay, and the update of task groups.
 *
 * Nodes are kept in the order of submission over all streams of a capture, which is one of the orders the device may
 * choose. A replay runs them until one waits for a value that is not there; once it is written, the replay goes on.
 * A task group must not be replaced before the replay that last ran it is known to have ended, nor run before its
 * replacement is.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

int fake_capturing_total;
#define TASKS_A_STREAM 1024      /* a longer capture takes further streams, */
#define STREAMS_A_COMMUNICATOR 2 /* and so do collectives; the device's own numbers differ by version */

static int next_id = 1;
static int graph_streams[MAX_DEVICES];
static void (*run_operator)(uint64_t);
static void (*release_operator)(uint64_t);

/* `run` is called for each operator node of a replay, `release` once for each that will not be run again. */
void fakecann_set_callbacks(void (*run)(uint64_t), void (*release)(uint64_t))
{
    run_operator = run;
    release_operator = release;
}

static void release(node *x)
{
    if (x->kind == NODE_OPERATOR && release_operator)
        release_operator(x->operator_id);
    if (x->kind == NODE_HOST && x->release)
        x->release(x->to);
}

static void run(const node *x)
{
    switch (x->kind) {
    case NODE_MEMCPY:
        fake_copy(x->to, x->from, x->bytes, x->direction);
        break;
    case NODE_MEMSET:
        memset(x->to, x->value, x->bytes);
        break;
    case NODE_HOST:
        x->function(x->to);
        break;
    case NODE_OPERATOR:
        run_operator(x->operator_id);
        break;
    case NODE_WAIT:
    case NODE_WRITE: /* by go_on(), which knows the stream */
        break;
    }
}

static void append(graph *g, node x)
{
    if (g->count == g->capacity) {
        g->capacity = g->capacity ? 2 * g->capacity : 16;
        g->nodes = realloc(g->nodes, g->capacity * sizeof *g->nodes);
    }
    g->nodes[g->count++] = x;
}

int fake_record(stream *s, node x)
{
    group *updating = s->updating;
    if (updating && updating->first + updating->updated < updating->last) {
        node *old = &updating->of->nodes[updating->first + updating->updated++];
        release(old);
        *old = x;
    } else if (updating) {
        s->invalid = 1;
        release(&x);
    } else if (s->captured) {
        append(s->captured, x);
    }
    return updating || s->captured;
}

/* An operator comes. 0: the stream runs it; 1: it captures; 2: it updates a task group; -1: it takes no work. */
int fakecann_submit_operator(aclrtStream handle)
{
    stream *s = fake_stream(handle);
    return fake_submit(s) ? -1 : s->updating ? 2 : s->captured ? 1 : 0;
}

void fakecann_record_operator(aclrtStream s, uint64_t id)
{
    fake_record(fake_stream(s), (node){.kind = NODE_OPERATOR, .operator_id = id});
}

/* For tests of what must not be: graphs that wait for ever are forgotten, so that the process can go on. */
void fakecann_abandon_graphs(void)
{
    fake_stream(NULL)->waiting = NULL;
    for (stream *s = fake_streams(); s; s = s->next) {
        s->waiting = NULL;
        s->updating = NULL;
    }
}

int fakecann_graph_nodes(aclmdlRI g) { return ((graph *)g)->count; }

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode)
{
    stream *s = fake_stream(handle);
    if (!handle)
        return fake_fail(E_DEFAULT_STREAM, "capture on the default stream");
    if (s->captured)
        return fake_fail(E_STREAM_CAPTURED, "the stream captures already");
    graph *g = calloc(1, sizeof *g);
    pthread_mutex_lock(&fake_lock);
    g->id = next_id++;
    g->device = s->device;
    fake_capturing_total++;
    fake_counters.graphs_live++;
    pthread_mutex_unlock(&fake_lock);
    s->captured = g;
    s->invalid = 0;
    return OK;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus *status, aclmdlRI *out)
{
    stream *s = fake_stream(handle);
    *status = !s->captured ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
              : s->invalid ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                           : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
    if (out)
        *out = s->captured;
    return OK;
}

static int streams_of(const graph *g)
{
    const void *seen[8];
    int communicators = 0;
    for (int i = 0; i < g->count && communicators < 8; i++) {
        int known = !g->nodes[i].from || g->nodes[i].kind != NODE_HOST;
        for (int j = 0; j < communicators && !known; j++)
            known = seen[j] == g->nodes[i].from;
        if (!known)
            seen[communicators++] = g->nodes[i].from;
    }
    return 1 + g->count / TASKS_A_STREAM + communicators * STREAMS_A_COMMUNICATOR;
}

int fake_streams_left(int device)
{
    int used = graph_streams[device];
    for (stream *s = fake_streams(); s; s = s->next)
        used += s->device == device;
    return (int)fake_env("FAKECANN_STREAMS", 2048) - used;
}

aclError aclrtGetStreamAvailableNum(uint32_t *count)
{
    int left = fake_streams_left(fake_current_device() < 0 ? 0 : fake_current_device());
    *count = left < 0 ? 0 : (uint32_t)left;
    return OK;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI *out)
{
    stream *s = fake_stream(handle);
    graph *g = s->captured;
    if (!g)
        return fake_fail(E_NOT_CAPTURED, "the stream does not capture");
    int invalid = 0;
    g->ended = 1;
    pthread_mutex_lock(&fake_lock);
    fake_capturing_total--;
    for (stream *each = fake_streams(); each; each = each->next)
        if (each->captured == g) {
            invalid |= each->invalid;
            each->captured = NULL;
        }
    pthread_mutex_unlock(&fake_lock);
    *out = g;
    if (invalid)
        return fake_fail(E_CAPTURE_INVALID, "the capture was invalidated");
    int wanted = streams_of(g);
    if (wanted > fake_streams_left(g->device))
        return fake_fail(E_NO_STREAM, "a graph needs %d streams and the device has %d left", wanted,
                         fake_streams_left(g->device));
    graph_streams[g->device] += g->streams = wanted;
    return OK;
}

/* Whatever the device would have to do in this order and might not: an error. */
static aclError enter_group(const stream *s, const group *each)
{
    if (each->update_tick && !fake_after(&s->seen, each->update_slot, each->update_tick))
        return fake_fail(E_INTERNAL, "a graph runs a task group, and its update may come later");
    return OK;
}

static aclError check_groups(stream *s, graph *g, int position)
{
    for (group *each = g->groups; each; each = each->next) {
        if (each->first != position || each->last == each->first)
            continue;
        aclError error = enter_group(s, each);
        if (error)
            return error;
        each->run_slot = s->slot;
        each->run_tick = s->seen.at[s->slot];
    }
    return OK;
}

static aclError go_on(stream *s)
{
    graph *g = s->waiting;
    for (; s->position < g->count; s->position++) {
        const node *x = &g->nodes[s->position];
        cell *e = x->to;
        if (x->kind == NODE_WAIT && *e->address != x->bytes)
            return OK;
        if (x->kind == NODE_WAIT)
            fake_stream_sees(s, &e->seen);
        if (x->kind == NODE_WRITE) {
            *e->address = x->bytes;
            e->slot = s->slot;
            e->tick = s->seen.at[s->slot];
        }
        aclError error = check_groups(s, g, s->position);
        if (error) {
            s->waiting = NULL;
            return error;
        }
        run(x);
    }
    s->waiting = NULL;
    return OK;
}

aclError fake_resume(const cell *e)
{
    aclError error = OK;
    for (stream *s = fake_streams(); s && !error; s = s->next)
        if (s->waiting && s->waiting->nodes[s->position].to == e)
            error = go_on(s);
    stream *s = fake_stream(NULL);
    if (!error && s->waiting && s->waiting->nodes[s->position].to == e)
        error = go_on(s);
    return error;
}

aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream s)
{
    if (fake_stream(s)->captured)
        return fake_fail(E_STREAM_CAPTURED, "a graph is launched on a capturing stream");
    aclError error = fake_submit(fake_stream(s));
    if (error)
        return error;
    fake_counters.graph_launches++;
    fake_stream(s)->waiting = handle;
    fake_stream(s)->position = 0;
    return go_on(fake_stream(s));
}

aclError aclmdlRIDestroy(aclmdlRI handle)
{
    graph *g = handle;
    if (!g)
        return OK;
    for (int i = 0; i < g->count; i++)
        release(&g->nodes[i]);
    for (group *each = g->groups, *next; each; each = next) {
        next = each->next;
        free(each);
    }
    graph_streams[g->device] -= g->streams;
    free(g->nodes);
    free(g);
    pthread_mutex_lock(&fake_lock);
    fake_counters.graphs_live--;
    pthread_mutex_unlock(&fake_lock);
    return OK;
}

aclError aclmdlRIDebugPrint(aclmdlRI g)
{
    printf("fake graph %d: %d nodes\n", ((graph *)g)->id, ((graph *)g)->count);
    return OK;
}

aclError aclmdlRIGetId(aclmdlRI g, uint32_t *id)
{
    *id = ((graph *)g)->id;
    return OK;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode)
{
    static __thread aclmdlRICaptureMode current;
    aclmdlRICaptureMode old = current;
    current = *mode;
    *mode = old;
    return OK;
}

/* ---- task groups: the nodes whose parameters may change between replays ---- */

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle)
{
    stream *s = fake_stream(handle);
    if (!s->captured)
        return fake_fail(E_NOT_CAPTURED, "a task group outside a capture");
    if (s->open)
        return fake_fail(E_PARAM, "a task group inside another");
    group *g = calloc(1, sizeof *g);
    *g = (group){.of = s->captured, .first = s->captured->count, .next = s->captured->groups};
    s->captured->groups = s->open = g;
    return OK;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp *out)
{
    stream *s = fake_stream(handle);
    if (!s->open)
        return fake_fail(E_PARAM, "no task group is open");
    s->open->last = s->captured->count;
    *out = s->open;
    s->open = NULL;
    return OK;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp g)
{
    stream *s = fake_stream(handle);
    if (s->captured || s->updating)
        return fake_fail(E_STREAM_CAPTURED, "an update on a stream that captures or updates");
    aclError error = fake_submit(s);
    if (error)
        return error;
    s->updating = g;
    s->updating->updated = 0;
    s->invalid = 0;
    return OK;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle)
{
    stream *s = fake_stream(handle);
    group *g = s->updating;
    if (!g)
        return fake_fail(E_PARAM, "no task group is being updated");
    s->updating = NULL;
    fake_counters.task_updates++;
    int wanted = g->last - g->first;
    if (s->invalid || g->updated != wanted)
        return fake_fail(E_TASK_UPDATE, "the update has %d nodes of %d, or more", g->updated, wanted);
    if (g->run_tick && !fake_after(&s->seen, g->run_slot, g->run_tick))
        return fake_fail(E_INTERNAL, "an update overtakes the replay before it");
    g->update_slot = s->slot;
    g->update_tick = s->seen.at[s->slot];
    return OK;
}

/* An operator of the graph engine would run here: fail, where a stub would leave the output as it was. */
aclError aclopCompileAndExecute(const char *type, int, const aclTensorDesc *const[], const aclDataBuffer *const[], int,
                                const aclTensorDesc *const[], aclDataBuffer *const[], const aclopAttr *,
                                aclopEngineType, aclopCompileType, const char *, aclrtStream)
{
    return fake_fail(E_NO_KERNEL, "the fake CANN has no kernel for the operator %s", type);
}

aclError aclopCompileAndExecuteV2(const char *type, int, aclTensorDesc *[], aclDataBuffer *[], int, aclTensorDesc *[],
                                  aclDataBuffer *[], aclopAttr *, aclopEngineType, aclopCompileType, const char *,
                                  aclrtStream)
{
    return fake_fail(E_NO_KERNEL, "the fake CANN has no kernel for the operator %s", type);
}
