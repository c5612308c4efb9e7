"""How many programs to launch: as many as the device has cores, each of which walks over its share of the work.

An Ascend core has one cube (matrix) unit and two vector units. A kernel with a matrix product is launched once a cube
core, one without once a vector core.
"""

from __future__ import annotations

from functools import cache

import torch

_PROGRAMS_PER_SM = 4  # what hides memory latency on NVIDIA GPUs, where several programs share a multiprocessor


def vector_programs(device: torch.device, work: int) -> int:
    """Programs for `work` items of a kernel without matrix products; at least 1."""
    return max(1, min(work, _cores(device)[1]))


def cube_programs(device: torch.device, work: int) -> int:
    """Programs for `work` items of a kernel with matrix products; at least 1."""
    return max(1, min(work, _cores(device)[0]))


@cache
def _cores(device: torch.device) -> tuple[int, int]:
    """(cube cores, vector cores)"""
    if device.type == "npu":
        properties = torch.npu.get_device_properties(device)  # type: ignore[attr-defined]
        return properties.cube_core_num, properties.vector_core_num
    if device.type == "cpu":  # Triton's interpreter, which runs one program after another
        return 3, 3
    programs = _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    return programs, programs
