"""xllm-npu: LLM inference for Ascend NPU servers. `LLM` and `SamplingParams` load on first use."""

from xllm_npu.version import __version__

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    # importlib, not `import`: importing xllm_npu.state must not count as importing the engine.
    import importlib

    if name == "LLM":
        return importlib.import_module("xllm_npu.llm").LLM
    if name == "SamplingParams":
        return importlib.import_module("xllm_npu.state.sampling_params").SamplingParams
    raise AttributeError(f"module 'xllm_npu' has no attribute {name!r}")
