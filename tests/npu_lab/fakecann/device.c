/* Devices, contexts, their properties; the counters. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake.h"

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
counters fake_counters;
size_t fake_used[MAX_DEVICES];

static __thread int current_device = -1;
static __thread char message[256];
static int initialized, highest_device = -1;
static int context_of[MAX_DEVICES]; /* a context is the address of its device's element */
static int64_t system_options[64];

long fake_env(const char *name, long fallback)
{
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : fallback;
}

int fake_device_count(void)
{
    long n = fake_env("FAKECANN_DEVICES", 1);
    return n > MAX_DEVICES ? MAX_DEVICES : (int)n;
}

size_t fake_device_bytes(void) { return (size_t)fake_env("FAKECANN_MEM_MB", 4096) << 20; }
int fake_strict(void) { return (int)fake_env("FAKECANN_STRICT", 1); }
int fake_current_device(void) { return current_device; }

aclError fake_fail(aclError code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    if (fake_env("FAKECANN_TRACE", 0))
        fprintf(stderr, "[fakecann] error %d: %s\n", code, message);
    return code;
}

void fakecann_counters(counters *out)
{
    pthread_mutex_lock(&fake_lock);
    *out = fake_counters;
    pthread_mutex_unlock(&fake_lock);
}

aclError aclInit(const char *)
{
    if (initialized)
        return 100002; /* ACL_ERROR_REPEAT_INITIALIZE */
    initialized = 1;
    return OK;
}

aclError aclFinalize(void)
{
    initialized = 0;
    return OK;
}

aclError aclrtGetDeviceCount(uint32_t *count)
{
    *count = (uint32_t)fake_device_count();
    return OK;
}

aclError aclrtSetDevice(int32_t device)
{
    if (device < 0 || device >= fake_device_count())
        return fake_fail(E_DEVICE, "invalid device %d", device);
    current_device = highest_device = device;
    return OK;
}

aclError aclrtGetDevice(int32_t *device)
{
    if (current_device < 0)
        return E_CONTEXT;
    *device = current_device;
    return OK;
}

aclError aclrtResetDevice(int32_t)
{
    current_device = -1;
    return OK;
}

aclError aclrtGetCurrentContext(aclrtContext *context)
{
    if (current_device < 0)
        return E_CONTEXT;
    *context = &context_of[current_device];
    return OK;
}

aclError aclrtSetCurrentContext(aclrtContext context)
{
    if (!context)
        return E_PARAM;
    current_device = (int)((int *)context - context_of);
    return OK;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active)
{
    if (flags)
        *flags = 0;
    *active = device <= highest_device;
    return OK;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free_bytes, size_t *total)
{
    if (current_device < 0)
        return E_CONTEXT;
    *total = fake_device_bytes();
    pthread_mutex_lock(&fake_lock);
    *free_bytes = *total - fake_used[current_device];
    pthread_mutex_unlock(&fake_lock);
    return OK;
}

const char *aclrtGetSocName(void)
{
    const char *name = getenv("FAKECANN_SOC");
    return name && *name ? name : "Ascend910B3";
}

const char *aclGetRecentErrMsg(void) { return message; }

/* A 910B3: 20 cube cores, 40 vector cores. */
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t *value)
{
    *value = 20;
    return OK;
}

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo what, int64_t *value)
{
    *value = what == ACL_DEVICE_INFO_AI_CORE_NUM ? 20 : 40;
    return OK;
}

aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid *uuid)
{
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[0] = (char)device;
    return OK;
}

aclError aclrtDeviceGetBareTgid(int32_t *pid)
{
    *pid = getpid();
    return OK;
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer)
{
    *can = device != peer;
    return OK;
}

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value)
{
    if ((unsigned)option < 64)
        system_options[option] = value;
    return OK;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value)
{
    *value = (unsigned)option < 64 ? system_options[option] : 0;
    return OK;
}

aclError aclGetCompileopt(aclCompileOpt, char *value, size_t bytes)
{
    snprintf(value, bytes, "disable");
    return OK;
}

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion *version)
{
    memset(version, 0, sizeof *version);
    strncpy(version->version, "8.5.0", sizeof version->version - 1);
    return OK;
}

void aclAppLog(aclLogLevel level, const char *function, const char *file, uint32_t line, const char *format, ...)
{
    if (fake_env("FAKECANN_TRACE", 0) < 2)
        return;
    va_list args;
    va_start(args, format);
    fprintf(stderr, "[acl %d %s:%u %s] ", level, file, line, function);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

/* Settings that change nothing here. */
size_t aclGetCompileoptSize(aclCompileOpt) { return 64; }
aclError aclSetCompileopt(aclCompileOpt, const char *) { return OK; }
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return OK; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return OK; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return OK; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return OK; }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return OK; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return OK; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return OK; }
