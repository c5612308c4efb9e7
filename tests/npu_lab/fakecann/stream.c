/* Streams and events. Work runs when it is submitted, so a stream is idle unless a graph waits in it for an external
 * event; what can go wrong is capturing, and order (order.c).
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>

#include "fake.h"

static stream *default_streams[MAX_DEVICES], *created;
static cell *cells;
static int next_id = 1;

stream *fake_stream(aclrtStream handle)
{
    if (handle)
        return handle;
    int device = fake_current_device() < 0 ? 0 : fake_current_device();
    if (!default_streams[device]) {
        default_streams[device] = calloc(1, sizeof(stream));
        default_streams[device]->device = device;
        default_streams[device]->slot = fake_take_clock();
    }
    return default_streams[device];
}

stream *fake_streams(void) { return created; }

aclError fake_refuse_in_capture(stream *s, const char *what)
{
    if (!fake_strict() || !s->captured)
        return OK;
    s->invalid = 1;
    return fake_fail(E_STREAM_CAPTURED, "%s on a capturing stream", what);
}

aclError aclrtCreateStreamWithConfig(aclrtStream *out, uint32_t, uint32_t)
{
    if (fake_current_device() < 0)
        return E_CONTEXT;
    if (fake_streams_left(fake_current_device()) < 1)
        return fake_fail(E_NO_STREAM, "the device has no stream left");
    stream *s = calloc(1, sizeof *s);
    pthread_mutex_lock(&fake_lock);
    s->slot = fake_take_clock();
    if (s->slot < 0) {
        pthread_mutex_unlock(&fake_lock);
        free(s);
        return fake_fail(E_NO_STREAM, "more than %d streams", MAX_CLOCKS);
    }
    s->id = next_id++;
    s->device = fake_current_device();
    s->next = created;
    created = s;
    fake_counters.streams_live++;
    pthread_mutex_unlock(&fake_lock);
    *out = s;
    return OK;
}

aclError aclrtCreateStream(aclrtStream *out) { return aclrtCreateStreamWithConfig(out, 0, 0); }

aclError aclrtDestroyStream(aclrtStream s)
{
    if (!s)
        return OK;
    pthread_mutex_lock(&fake_lock);
    stream **at = &created;
    while (*at && *at != s)
        at = &(*at)->next;
    if (*at) {
        *at = (*at)->next;
        fake_counters.streams_live--;
        fake_give_clock(((stream *)s)->slot);
    }
    pthread_mutex_unlock(&fake_lock);
    free(s);
    return OK;
}

aclError aclrtDestroyStreamForce(aclrtStream s) { return aclrtDestroyStream(s); }

/* An error if the stream would never be done. */
static aclError finish(stream *s)
{
    if (s->waiting)
        return fake_fail(E_SYNC_TIMEOUT, "a graph waits for an event that nobody recorded");
    return fake_host_sees(&s->seen);
}

aclError aclrtSynchronizeStream(aclrtStream s)
{
    fake_counters.syncs++;
    aclError error = fake_refuse_in_capture(fake_stream(s), "synchronize");
    return error ? error : finish(fake_stream(s));
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream s, int32_t) { return aclrtSynchronizeStream(s); }

aclError aclrtSynchronizeDevice(void)
{
    fake_counters.syncs++;
    if (fake_strict() && fake_capturing_total)
        return fake_fail(E_CAPTURE_MODE, "device synchronize while a stream captures");
    aclError error = finish(fake_stream(NULL));
    for (stream *s = created; s && !error; s = s->next)
        error = finish(s);
    return error;
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

aclError aclrtStreamQuery(aclrtStream s, aclrtStreamStatus *status)
{
    *status = fake_stream(s)->waiting ? ACL_STREAM_STATUS_NOT_READY : ACL_STREAM_STATUS_COMPLETE;
    aclError error = fake_refuse_in_capture(fake_stream(s), "query");
    return error || fake_stream(s)->waiting ? error : finish(fake_stream(s));
}

aclError aclrtStreamGetId(aclrtStream s, int32_t *id)
{
    *id = fake_stream(s)->id;
    return OK;
}

aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t *flag)
{
    *flag = 0;
    return OK;
}

aclError aclrtLaunchHostFunc(aclrtStream s, aclrtHostFunc function, void *argument)
{
    node x = {.kind = NODE_HOST, .function = function, .to = argument};
    aclError error = fake_submit(fake_stream(s));
    if (error)
        return error;
    if (!fake_record(fake_stream(s), x))
        function(argument);
    return OK;
}

aclError aclrtLaunchCallback(aclrtCallback function, void *argument, aclrtCallbackBlockType, aclrtStream)
{
    function(argument);
    return OK;
}

aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue *) { return OK; }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return OK; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return OK; }
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return OK; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return OK; }
aclError aclrtProcessReport(int32_t) { return OK; }

/* ---- events ---- */

aclError aclrtCreateEventExWithFlag(aclrtEvent *out, uint32_t flags)
{
    event *e = calloc(1, sizeof *e);
    e->flags = flags;
    pthread_mutex_lock(&fake_lock);
    fake_counters.events_live++;
    pthread_mutex_unlock(&fake_lock);
    *out = e;
    return OK;
}

aclError aclrtCreateEventWithFlag(aclrtEvent *out, uint32_t flags) { return aclrtCreateEventExWithFlag(out, flags); }

aclError aclrtDestroyEvent(aclrtEvent e)
{
    free(e);
    pthread_mutex_lock(&fake_lock);
    fake_counters.events_live--;
    pthread_mutex_unlock(&fake_lock);
    return OK;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream s)
{
    struct timespec now;
    event *e = handle;
    aclError error = fake_submit(fake_stream(s));
    if (error)
        return error;
    clock_gettime(CLOCK_MONOTONIC, &now);
    e->nanoseconds = now.tv_sec * 1000000000ULL + now.tv_nsec;
    e->captured = e->flags & ACL_EVENT_EXTERNAL ? NULL : fake_stream(s)->captured;
    e->graph_id = e->captured ? e->captured->id : 0;
    if (!fake_stream(s)->captured)
        e->seen = fake_stream(s)->seen;
    return OK;
}

/* The capture in which it was recorded, if that goes on. A graph may be gone, so the streams are asked. */
static graph *capture_of(event *e)
{
    for (stream *s = created; e->captured && s; s = s->next)
        if (s->captured == e->captured && s->captured->id == e->graph_id)
            return s->captured;
    return NULL;
}

aclError aclrtStreamWaitEvent(aclrtStream s, aclrtEvent handle)
{
    event *e = handle;
    graph *g = capture_of(e);
    if (g) {
        if (!fake_stream(s)->captured)
            fake_stream(s)->captured = g; /* a fork joins the capture, as on the device */
        return OK;
    }
    aclError error = fake_submit(fake_stream(s));
    if (!error && !fake_stream(s)->captured)
        fake_stream_sees(fake_stream(s), &e->seen);
    return error;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return OK; }

/* ---- words of memory that streams write and wait for ---- */

static cell *cell_at(void *address)
{
    cell *c = cells;
    while (c && c->address != address)
        c = c->next;
    if (!c) {
        c = calloc(1, sizeof *c);
        c->address = address;
        c->next = cells;
        cells = c;
    }
    return c;
}

void fake_forget_cell(void *address)
{
    for (cell *c = cells; c; c = c->next)
        if (c->address == address)
            c->tick = 0;
}

aclError aclrtValueWait(void *address, uint64_t value, uint32_t, aclrtStream handle)
{
    stream *s = fake_stream(handle);
    cell *c = cell_at(address);
    aclError error = fake_submit(s);
    if (error || fake_record(s, (node){.kind = NODE_WAIT, .to = c, .bytes = value}))
        return error;
    if (*c->address != value)
        return fake_fail(E_SYNC_TIMEOUT, "a stream waits for a value that nobody has written");
    fake_stream_sees(s, &c->seen);
    return OK;
}

aclError aclrtValueWrite(void *address, uint64_t value, uint32_t, aclrtStream handle)
{
    stream *s = fake_stream(handle);
    cell *c = cell_at(address);
    aclError error = fake_submit(s);
    if (error || fake_record(s, (node){.kind = NODE_WRITE, .to = c, .bytes = value}))
        return error;
    if (c->tick && !fake_after(&s->seen, c->slot, c->tick))
        return fake_fail(E_INTERNAL, "an event is recorded, and the graph that resets it may not have ended");
    c->seen = s->seen;
    *c->address = value;
    return fake_resume(c);
}

aclError aclrtSynchronizeEvent(aclrtEvent handle)
{
    fake_counters.syncs++;
    if (fake_strict() && capture_of(handle))
        return fake_fail(E_EVENT_CAPTURED, "synchronize on an event recorded in a capture");
    return fake_host_sees(&((event *)handle)->seen);
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status)
{
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return fake_host_sees(&((event *)handle)->seen);
}

aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus *status)
{
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return OK;
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent begin, aclrtEvent end)
{
    *milliseconds = (float)((double)((event *)end)->nanoseconds - (double)((event *)begin)->nanoseconds) / 1e6f;
    return OK;
}
