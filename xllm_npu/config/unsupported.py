"""Names we know from the reference and from vLLM whose feature this version does not have.

A launch file that spells out a default should not fail for it, so each name is accepted at a value that asks
for nothing and refused at any other. Adding a feature means moving its name from here to a section.
"""

from __future__ import annotations

from typing import Any

# Name -> the values that ask for nothing; the first is the default and says whether the flag is a boolean.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # Service
    "num_request_handling_threads": (4,),
    "rpc_idle_timeout_s": (-1,), "rpc_channel_timeout_ms": (-1,), "max_reconnect_count": (40,),
    "num_response_handling_threads": (4,), "health_check_interval_ms": (3000,),
    "enable_json_object_output": (True,),
    "enable_verbose_trace_log": (False,), "verbose_trace_log_path": ("",),
    "verbose_trace_log_max_size_mb": (1024,), "verbose_trace_log_max_files": (1000,),
    # Model
    "backend": ("", "auto", "llm"),
    "python_model_path": ("",), "trust_remote_code": (False,), "limit_image_per_prompt": (8,),
    "max_encoder_cache_size": (0,),
    "flashinfer_workspace_buffer_size": (128 * 2**20,),
    "enable_return_mm_full_embeddings": (False,), "mm_download_headers": ("",),
    "use_audio_in_video": (False,),
    "use_cpp_chat_template": (False, True), "enable_mistral_prompt_to_message": (False,),
    # Loading
    "enable_manual_loader": (False,), "enable_rolling_load": (False,), "rolling_load_num_cached_layers": (2,),
    "rolling_load_num_rolling_slots": (-1,), "enable_prefetch_weight": (False,),
    # KV cache and virtual memory
    "max_linear_state_cache_slots": (0,), "indexer_cache_dtype": ("auto",), "enable_xtensor": (False,),
    "enable_virtual_memory": (False,),
    # KV store
    "prefetch_timeout": (0,), "prefetch_batch_size": (2,), "layers_wise_copy_batchs": (4,),
    "host_blocks_factor": (0,), "enable_kvcache_store": (False,), "store_protocol": ("tcp",),
    "store_master_server_address": ("",), "store_metadata_server": ("",), "store_local_hostname": ("",),
    "enable_control_h2d_block_num": (False,),
    # Scheduler
    "aggressive_coeff": (1,), "use_zero_evict": (False,), "max_decode_token_per_sequence": (256,),
    "chunked_match_frequency": (2,), "short_request_first_threshold": (0,),
    "short_request_first_long_max_wait_ms": (0,), "request_queue_size": (100000,),
    # Parallelism
    "cp_size": (1,), "kv_split_size": (1,), "sp_size": (1,), "cfg_size": (1,), "vae_size": (1,),
    "text_encoder_tp_size": (1,), "enable_prefill_sp": (False,), "enable_mm_encoder_dp": (False,),
    "enable_multi_stream_parallel": (False,), "micro_batch_num": (1,), "enable_dp_balance": (False,),
    "enable_runtime_cp_dp_switch": (False,), "dual_mode_port_stride": (256,),
    "enable_flip_verbose_log": (False,),
    "rank_tablefile": ("",),
    # Distributed
    "xtensor_master_node_addr": ("127.0.0.1:19889", ""),
    "etcd_addr": ("",), "etcd_namespace": ("",), "enable_service_routing": (False,),
    "heart_beat_interval": (0.5,), "etcd_ttl": (3,),
    # Prefill and decode on different servers
    "enable_disagg_pd": (False,), "enable_pd_ooc": (False,), "disagg_pd_port": (7777,),
    "instance_role": ("DEFAULT",), "kv_cache_transfer_type": ("LlmDataDist", "Mooncake", "HCCL"),
    "kv_cache_transfer_mode": ("PUSH",), "transfer_listen_port": (26000,), "kv_push_dst_rotate": (False,),
    # Speculation
    "draft_model": ("",), "draft_devices": ("",), "num_speculative_tokens": (0,),
    "speculative_algorithm": ("MTP", ""), "speculative_suffix_max_depth": (64,),
    "speculative_suffix_factor": (1,), "speculative_suffix_offset": (0,),
    "speculative_suffix_min_prob": (0.1,),
    "speculative_suffix_cached_requests": (-1,), "speculative_suffix_tree": (False,),
    "enable_opt_validate_probs": (False,), "enable_atb_spec_kernel": (False,),
    "enable_mtp_draft_body_tp1": (False,), "enable_dspark_native_sas": (False,),
    "enable_adaptive_speculative_decode": (False,), "adaptive_speculative_min_gain": (0,),
    # Profiling
    "enable_profile_step_time": (False,), "enable_profile_token_budget": (False,),
    "profile_max_prompt_length": (2048,),
    "enable_profile_kv_blocks": (True,), "disable_ttft_profiling": (False,),
    "enable_forward_interruption": (False,), "enable_online_profile": (False,), "profile_backend": ("torch",),
    # Execution
    "acl_graph_decode_batch_size_limit": (16,),
    "enable_graph_double_buffer": (True,), "enable_graph_mode_decode_no_padding": (False,),
    "enable_graph_vmm_pool": (True,),
    "use_contiguous_input_buffer": (True,), "output_shm_size": (128,),
    "python_graph_backend": ("off", ""), "enable_task_pipeline": (False,),
    "enable_unified_mtp_graph": (False,),
    # Kernels
    "npu_kernel_backend": ("AUTO", "TORCH"), "enable_fused_mc2": (-1, 0),
    "enable_customize_mla_kernel": (False,), "enable_intralayer_addnorm": (False,),
    "enable_interlayer_addnorm": (False,), "enable_split_rmsnorm_rope": (False,),
    "enable_aclnn_matmul": (False,), "enable_aclnn_swiglu": (False,),
    # Beam search
    "enable_beam_search_kernel": (False,), "beam_width": (1,), "enable_block_copy_kernel": (True,),
    "enable_topk_sorted": (True,),
    # Diffusion and recommendation
    "max_requests_per_batch": (1,), "max_decode_rounds": (0,), "enable_constrained_decoding": (False,),
    # vLLM
    "pipeline_parallel_size": (1,), "pp": (1,),
    "quantization": ("", "none"), "compilation_config": ("",),
    "speculative_config": ("",), "kv_transfer_config": ("",),
    "structured_outputs_config": ("",),
    "allowed_local_media_path": ("",),
    "allowed_media_domains": ("",), "limit_mm_per_prompt": ("",), "enable_prompt_tokens_details": (False,),
    "enable_force_include_usage": (False,), "additional_config": ("",), "swap_space": (0, ""),
    "cpu_offload_gb": (0,),
}  # fmt: skip

_WHY = {
    "trust_remote_code": "code from a checkpoint is never run; this package has the architectures",
}


def is_boolean(name: str) -> bool:
    return isinstance(UNSUPPORTED[name][0], bool)


def refusal(name: str, spelled: str, value: Any) -> str | None:
    """Why `value` cannot be had, or None where it asks for nothing."""
    neutral = UNSUPPORTED[name]
    if any(_same(value, candidate) for candidate in neutral):
        return None
    asked = spelled if value in (True, "true") and is_boolean(name) else f"{spelled}={value}"
    why = f": {_WHY[name]}" if name in _WHY else ""
    return f"{asked} is not available in this version{why}."


def _same(given: Any, candidate: Any) -> bool:
    """Equal as a flag would spell both: 0.50 is 0.5, MTP is mtp, None is the empty string."""
    text = "" if given is None else str(given).strip().lower()
    if text == str(candidate).strip().lower():
        return True
    if isinstance(candidate, bool):
        return text in (("1", "yes", "on") if candidate else ("0", "no", "off"))
    if isinstance(candidate, (int, float)):
        try:
            return float(text) == float(candidate)
        except ValueError:
            return False
    return False
