/* HCCL's types. hccl_types.h is C++ only (constants as array bounds), so the few that are used are restated here; that
 * they are right shows when torch_npu's ProcessGroupHCCL runs over them (test_process_group.py). */
#ifndef FAKE_HCCL_H
#define FAKE_HCCL_H

#include <stddef.h>
#include <stdint.h>

typedef void *HcclComm;
typedef enum {
    HCCL_SUCCESS = 0,
    HCCL_E_PARA = 1,
    HCCL_E_PTR = 2,
    HCCL_E_MEMORY = 3,
    HCCL_E_SYSCALL = 8,
    HCCL_E_TIMEOUT = 9,
    HCCL_E_RUNTIME = 15
} HcclResult;
typedef enum { HCCL_REDUCE_SUM = 0, HCCL_REDUCE_PROD, HCCL_REDUCE_MAX, HCCL_REDUCE_MIN } HcclReduceOp;
typedef enum {
    HCCL_DATA_TYPE_INT8 = 0,
    HCCL_DATA_TYPE_INT16,
    HCCL_DATA_TYPE_INT32,
    HCCL_DATA_TYPE_FP16,
    HCCL_DATA_TYPE_FP32,
    HCCL_DATA_TYPE_INT64,
    HCCL_DATA_TYPE_UINT64,
    HCCL_DATA_TYPE_UINT8,
    HCCL_DATA_TYPE_UINT16,
    HCCL_DATA_TYPE_UINT32,
    HCCL_DATA_TYPE_FP64,
    HCCL_DATA_TYPE_BFP16,
    HCCL_DATA_TYPE_INT128
} HcclDataType;
#define COMM_NAME_MAX_LENGTH 128
typedef struct {
    char internal[4108];
} HcclRootInfo;
typedef struct {
    char reserved[24];
    uint32_t buffer_mb, deterministic;
    char hcclCommName[COMM_NAME_MAX_LENGTH]; /* more follows */
} HcclCommConfig;
typedef enum { HCCL_SEND = 0, HCCL_RECV = 1 } HcclSendRecvType;
typedef struct {
    HcclSendRecvType sendRecvType;
    void *buf;
    uint64_t count;
    HcclDataType dataType;
    uint32_t remoteRank;
} HcclSendRecvItem;
enum { HCCL_COMM_CONFIG_COMM_NAME = 2 };

size_t fake_element_bytes(HcclDataType type);
/* to[i] = op(to[i], from[i]) for `count` elements. */
void fake_reduce(void *to, const void *from, size_t count, HcclDataType type, HcclReduceOp op);

#endif
