"""xllm-npu: LLM inference for Ascend NPU servers. What it exports loads on first use."""

from xllm_npu.version import __version__

__all__ = ["LLM", "BeamSearchParams", "LoRARequest", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    # importlib, not `import`: importing xllm_npu.state must not count as importing the engine.
    import importlib

    if name == "LLM":
        return importlib.import_module("xllm_npu.llm").LLM
    if name == "SamplingParams":
        return importlib.import_module("xllm_npu.state.sampling_params").SamplingParams
    if name == "BeamSearchParams":
        return importlib.import_module("xllm_npu.state.beam_search_params").BeamSearchParams
    if name == "LoRARequest":
        return importlib.import_module("xllm_npu.state.lora_request").LoRARequest
    raise AttributeError(f"module 'xllm_npu' has no attribute {name!r}")
