"""A platform, a model and a policy from outside the packages: each one file and one registry line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny_model import make_tiny_model

# What a third party writes: one file for each, and the lines that register them.
FILES = {
    "toy_platform.py": """
from xllm_platform.cpu.device import CpuPlatform

class ToyPlatform(CpuPlatform):
    name = "toy"

    def device_name(self):
        return "Toy 9000"
""",
    "toy_model.py": """
from xllm_models.llama import LlamaForCausalLM

class ToyForCausalLM(LlamaForCausalLM):
    pass
""",
    "toy_policy.py": """
from xllm_npu.scheduling.policy import Kind, Policy, Segment

class OneAtATime(Policy):
    name = "one_at_a_time"

    def segments(self, running, plan):
        if running.num_running:
            yield Segment(Kind.CHUNK)
            yield Segment(Kind.DECODE)
        else:
            yield Segment(Kind.ADMIT)
""",
    "toy_plugin.py": """
from xllm_models.registry import register_model
from xllm_npu.scheduling.policy import register_policy

def register():
    from toy_policy import OneAtATime
    register_model("ToyForCausalLM", "toy_model:ToyForCausalLM")
    register_policy(OneAtATime)
""",
    "toy-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n",
    "toy-1.0.dist-info/entry_points.txt": """
[xllm_npu.platforms]
toy = toy_platform:ToyPlatform

[xllm_npu.plugins]
toy = toy_plugin:register
""",
}

USE = """
import json, sys
from xllm_npu import LLM, SamplingParams
with LLM(sys.argv[1], platform="toy", scheduling_policy="one_at_a_time", dtype="float32", max_cache_size="8MiB",
         block_size=16, num_threads=1) as llm:
    results = llm.generate(json.loads(sys.argv[2]), SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    print(json.dumps([llm.info.device, [r.outputs[0].token_ids for r in results]]))
"""


@pytest.fixture
def outside(tmp_path) -> dict[str, str]:
    """An environment whose path holds the third party's distribution."""
    for name, text in FILES.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    roots = [str(tmp_path / "site"), *(str(Path.cwd() / r) for r in (".", "platform", "kernels_npu", "models"))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}


def test_toy_platform_model_and_policy_serve_together(outside, tmp_path):
    directory = tmp_path / "model"
    make_tiny_model(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["ToyForCausalLM"]}))
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    done = subprocess.run([sys.executable, "-c", USE, str(directory), json.dumps(prompts)], env=outside,
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    device, tokens = json.loads(done.stdout.splitlines()[-1])
    assert device == "Toy 9000"
    for prompt, got in zip(prompts, tokens):
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt):].tolist()
        assert got == wanted


@pytest.mark.slow
def test_without_the_registry_lines_they_are_refused(tmp_path):
    directory = tmp_path / "model"
    make_tiny_model(directory)
    for flags, names in (
        (["--platform", "toy"], "npu"),
        (["--scheduling_policy", "one_at_a_time"], "decode_first, unified"),
    ):
        command = [sys.executable, "-m", "xllm_npu.cli", "generate", str(directory), "--prompt", "x", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode != 0
        assert names in done.stderr
        assert "Traceback" not in done.stderr
