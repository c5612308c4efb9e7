"""AscendCL's calls that torch_npu does not pass on, by ctypes. Every aclError becomes an exception.

Prototypes, structures and codes are those of acl/acl_rt.h and acl/error_codes/rt_error_codes.h, which torch_npu's wheel
carries. Does not initialise AscendCL and selects no device: torch_npu has done both.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from xllm_platform.base import OutOfMemoryError, PlatformError

CANN_LIBRARY = "libascendcl.so"

# Those that the calls of this file can return.
MEANINGS = {
    100000: "an argument is invalid",
    100001: "AscendCL is not initialised",
    107000: "an argument is invalid",
    107001: "there is no such device",
    107002: "the thread has no context: no device is selected",
    107008: "an address is not aligned",
    107017: "a handle is invalid",
    107018: "the kind of memory is invalid",
    107030: "a stream is being captured, which forbids the call",
    200000: "the host has no memory left",
    200001: "the interface is not supported",
    207000: "the feature is not supported: driver or CANN are too old for it",
    207001: "no memory is left",
    207002: "memory could not be freed",
    207004: "no device can be used",
    207005: "a resource could not be allocated",
    207006: "permission denied",
    207018: "the device has no memory left",
    207020: "the driver did not answer in time",
    500000: "an internal error",
    507000: "an internal error of the runtime",
    507033: "the device could not be set up",
    507899: "an internal error of the driver",
}
OUT_OF_MEMORY = frozenset((207001, 207018))
NO_FEATURE = frozenset((200001, 207000))


class AclError(PlatformError):
    """A call of AscendCL failed; `code` is its aclError."""

    def __init__(self, call: str, code: int, detail: str = "") -> None:
        self.call, self.code = call, code
        meaning = MEANINGS.get(code, "an error that this program does not know; see CANN's documentation of aclError")
        super().__init__(f"{call} failed with {code}: {meaning}{f' ({detail})' if detail else ''}")


class AclOutOfMemoryError(AclError, OutOfMemoryError):
    pass


class Location(ctypes.Structure):
    """aclrtMemLocation"""

    _fields_ = [("id", c_uint32), ("type", c_int)]


class PhysicalProperties(ctypes.Structure):
    """aclrtPhysicalMemProp"""

    _fields_ = [("handle_type", c_int), ("allocation_type", c_int), ("attribute", c_int), ("location", Location),
                ("reserved", c_uint64)]


# What each function takes; all return an aclError.
_PROTOTYPES: dict[str, list[Any]] = {
    "aclrtGetStreamAvailableNum": [POINTER(c_uint32)],
    "aclrtReserveMemAddress": [POINTER(c_void_p), c_size_t, c_size_t, c_void_p, c_uint64],
    "aclrtReleaseMemAddress": [c_void_p],
    "aclrtMemGetAllocationGranularity": [POINTER(PhysicalProperties), c_int, POINTER(c_size_t)],
    "aclrtMallocPhysical": [POINTER(c_void_p), c_size_t, POINTER(PhysicalProperties), c_uint64],
    "aclrtFreePhysical": [c_void_p],
    "aclrtMapMem": [c_void_p, c_size_t, c_size_t, c_void_p, c_uint64],
    "aclrtUnmapMem": [c_void_p],
    "aclrtDeviceGetBareTgid": [POINTER(c_int32)],
    "aclrtMemExportToShareableHandle": [c_void_p, c_int, c_uint64, POINTER(c_uint64)],
    "aclrtMemSetPidToShareableHandle": [c_uint64, POINTER(c_int32), c_size_t],
    "aclrtMemImportFromShareableHandle": [c_uint64, c_int32, POINTER(c_void_p)],
}


class Acl:
    """The library. `call` is the only way into it."""

    _loaded: Acl | None = None

    def __init__(self, library: Any) -> None:
        self._library = library
        if hasattr(library, "aclGetRecentErrMsg"):
            library.aclGetRecentErrMsg.restype = c_char_p

    @classmethod
    def load(cls) -> Acl:
        """Raises PlatformError if CANN is not there."""
        if cls._loaded is None:
            try:
                cls._loaded = cls(ctypes.CDLL(CANN_LIBRARY))
            except OSError as error:
                raise PlatformError(f"CANN cannot be loaded: {error}; source its set_env.sh") from error
        return cls._loaded

    def has(self, name: str) -> bool:
        return hasattr(self._library, name)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises AclError if the call fails or this CANN has no such function."""
        if not self.has(name):
            raise PlatformError(f"This CANN has no {name}: it is too old for what was asked.")
        function = getattr(self._library, name)
        function.argtypes, function.restype = _PROTOTYPES[name], c_int
        code = function(*arguments)
        if code:
            kind = AclOutOfMemoryError if code in OUT_OF_MEMORY else AclError
            raise kind(name, code, self._recent_message())

    def _recent_message(self) -> str:
        if not self.has("aclGetRecentErrMsg"):
            return ""
        message = self._library.aclGetRecentErrMsg()
        return " ".join(message.decode(errors="replace").split()) if message else ""

    def streams_left(self) -> int | None:
        """Streams that can still be made on the selected device; None: this CANN does not tell."""
        if not self.has("aclrtGetStreamAvailableNum"):
            return None
        count = c_uint32()
        try:
            self.call("aclrtGetStreamAvailableNum", ctypes.byref(count))
        except AclError as error:
            if error.code in NO_FEATURE:
                return None
            raise
        return count.value
