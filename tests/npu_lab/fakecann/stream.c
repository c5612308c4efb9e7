/* Streams and events. Work runs when it is submitted, so a stream is always idle; what can go wrong is capturing. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>

#include "fake.h"

typedef struct {
    uint64_t nanoseconds;
    uint32_t flags;
    graph *captured; /* recorded inside this capture */
    int graph_id;    /* of `captured`, which may be gone */
} event;
static stream *default_streams[MAX_DEVICES], *created;
static int next_id = 1;

stream *fake_stream(aclrtStream handle)
{
    if (handle)
        return handle;
    int device = fake_current_device() < 0 ? 0 : fake_current_device();
    if (!default_streams[device]) {
        default_streams[device] = calloc(1, sizeof(stream));
        default_streams[device]->device = device;
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
    stream *s = calloc(1, sizeof *s);
    pthread_mutex_lock(&fake_lock);
    *s = (stream){.id = next_id++, .device = fake_current_device(), .next = created};
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
    }
    pthread_mutex_unlock(&fake_lock);
    free(s);
    return OK;
}

aclError aclrtDestroyStreamForce(aclrtStream s) { return aclrtDestroyStream(s); }

aclError aclrtSynchronizeStream(aclrtStream s)
{
    fake_counters.syncs++;
    return fake_refuse_in_capture(fake_stream(s), "synchronize");
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream s, int32_t) { return aclrtSynchronizeStream(s); }

aclError aclrtSynchronizeDevice(void)
{
    fake_counters.syncs++;
    if (fake_strict() && fake_capturing_total)
        return fake_fail(E_CAPTURE_MODE, "device synchronize while a stream captures");
    return OK;
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

aclError aclrtStreamQuery(aclrtStream s, aclrtStreamStatus *status)
{
    *status = ACL_STREAM_STATUS_COMPLETE;
    return fake_refuse_in_capture(fake_stream(s), "query");
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
    clock_gettime(CLOCK_MONOTONIC, &now);
    e->nanoseconds = now.tv_sec * 1000000000ULL + now.tv_nsec;
    e->captured = e->flags & ACL_EVENT_EXTERNAL ? NULL : fake_stream(s)->captured;
    e->graph_id = e->captured ? e->captured->id : 0;
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
    graph *g = capture_of(handle);
    if (g && !fake_stream(s)->captured)
        fake_stream(s)->captured = g; /* a fork joins the capture, as on the device */
    return OK;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return OK; }

aclError aclrtSynchronizeEvent(aclrtEvent handle)
{
    fake_counters.syncs++;
    if (fake_strict() && capture_of(handle))
        return fake_fail(E_EVENT_CAPTURED, "synchronize on an event recorded in a capture");
    return OK;
}

aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus *status)
{
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return OK;
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
