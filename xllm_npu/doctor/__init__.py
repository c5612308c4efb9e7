"""`xllm-npu doctor`: can this machine serve, and what would make it better."""
