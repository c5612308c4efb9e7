"""How the model is spread over devices and machines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_serializer, field_validator

from xllm_npu.config.address import parse_address
from xllm_npu.config.section import Section
from xllm_npu.config.values import MASK, CaseFolded, Metavar, OptionalSecret


class ParallelSettings(Section):
    """Parallelism"""

    tp_size: int = Field(default=1, ge=1, le=1024, description="devices that share each tensor")
    dp_size: int = Field(default=1, ge=1, le=1024, description="copies of the model that share the requests")
    ep_size: int = Field(default=1, ge=1, le=1024, description="devices that share the experts")
    enable_expert_parallel: bool = Field(default=False, description="share the experts among all devices")
    expert_parallel_degree: int = Field(
        default=0, ge=0, le=2,
        description="how tokens meet the experts of other devices; 0 and 1: all tokens come to all devices; 2: each "
        "goes to its experts' devices only, which needs experts shared among all",
    )
    enable_prefix_cache_aware_dp_routing: bool = Field(
        default=False, description="send a request to the copy that has its beginning in its prefix cache"
    )
    prefix_cache_aware_dp_routing_match_threshold: float = Field(
        default=0.5, gt=0, le=1, description="share of a prompt that must be cached for that"
    )
    prefix_cache_aware_dp_routing_imbalance_threshold: float = Field(
        default=0.1, ge=0, le=1, description="how much fuller than the emptiest that copy may be, as a share"
    )
    enable_eplb: bool = Field(default=False, description="move experts between devices by how busy they are")
    redundant_experts_num: int = Field(
        default=1, ge=0, le=1024, description="places on each device for copies of busy experts, with --enable-eplb"
    )
    eplb_update_interval: int = Field(
        default=1000, ge=1, le=10**9, description="steps between looks at how busy experts are"
    )
    eplb_update_threshold: float = Field(
        default=0.8, ge=0, le=1,
        description="a layer's experts move when the cosine between its load then and now falls below this",
    )
    communication_backend: Annotated[Literal["auto", "hccl", "nccl", "gloo"], CaseFolded] = Field(
        default="auto", description="torch.distributed backend; auto: the platform's"
    )

    @property
    def expert_ranks(self) -> int:
        """Devices that share the experts, however that was asked for."""
        return self.tp_size * self.dp_size if self.enable_expert_parallel else self.ep_size


MEMORY_MASTER = "127.0.0.1:19889"  # the reference's default, here: any


class DistributedSettings(Section):
    """Several machines"""

    nnodes: int = Field(default=1, ge=1, le=4096, description="machines; one `serve` with the same flags on each")
    node_rank: int = Field(
        default=0, ge=0, le=4095, description="which of them this is; 0 serves HTTP, the others lend their devices"
    )
    master_node_addr: Annotated[str, Metavar("ADDR:PORT")] = Field(
        default="127.0.0.1:19888", min_length=1, description="where node 0 waits for the others"
    )
    worker_memory_master_node_addr: Annotated[str, Metavar("ADDR:PORT")] = Field(
        default=MEMORY_MASTER, min_length=1,
        description="where rank 0 waits for the other machines' virtual memory, data-parallel rank n at the port plus "
        "n; default: its own address and a free port",
    )
    node_addr: Annotated[str | None, Metavar("ADDR")] = Field(
        default=None,
        description="this machine's address, as the others reach it; default: the one it reaches node 0 from",
    )
    node_join_timeout: float = Field(
        default=300.0, ge=1, le=86400, description="seconds that machines wait for one another at start"
    )
    collective_timeout: float = Field(
        default=300.0, ge=1, le=86400,
        description="seconds after which ranks that wait for each other are given up, and those missing are named",
    )
    cluster_secret: OptionalSecret = Field(
        default=None,
        repr=False,
        description="the same on every machine: only those that know it can join; without it the master's port must "
        "be on a private network",
    )
    placement: Annotated[Literal["nodes", "ray"], CaseFolded] = Field(
        default="nodes",
        description="nodes: devices of --nnodes machines; ray: one actor a device in a running Ray cluster",
    )

    @field_validator("master_node_addr", "worker_memory_master_node_addr")
    @classmethod
    def _address(cls, text: str) -> str:
        return str(parse_address(text))

    @field_serializer("cluster_secret")
    def _mask(self, secret: str | None) -> str | None:
        return MASK if secret else None
