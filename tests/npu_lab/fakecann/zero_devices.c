/* All the code of a CANN with no device: enough to import torch_npu, read its schemas and run its meta kernels. */
#include <stdint.h>

int aclrtGetDeviceCount(uint32_t *count)
{
    *count = 0;
    return 0;
}

int aclrtGetDevice(int32_t *device)
{
    (void)device;
    return 107002; /* ACL_ERROR_RT_CONTEXT_NULL */
}

const char *aclrtGetSocName(void) { return "Ascend910B3"; }
const char *aclGetRecentErrMsg(void) { return ""; }
