"""CUDA tensors over memory that they do not own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def tensor_at(
    address: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """`stride` in elements. The memory must be there whenever work on the tensor runs, not yet now."""
    # torch.as_tensor over an address asks the driver what lies there, which fails where nothing is mapped yet.
    make: Any = torch._C
    reach = 1 + sum((count - 1) * step for count, step in zip(size, stride)) if math.prod(size) else 0
    storage = make._construct_storage_from_data_pointer(address, device, reach * dtype.itemsize)
    return make._construct_CUDA_Tensor_From_Storage_And_Metadata(
        {"size": tuple(size), "stride": tuple(stride), "nbytes": reach * dtype.itemsize, "dtype": dtype,
         "data_ptr": address, "storage_offset": 0, "device": device}, storage)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at the same place, without keeping them."""
    return tensor_at(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
