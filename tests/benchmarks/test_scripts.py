"""The benchmark scripts run and print what they promise; their figures are nobody's assertion."""

import json
import subprocess
import sys

import pytest


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_host_step_ends_with_one_json_object():
    last = run("benchmarks/host_step.py", "--json", "--sizes", "4,8", "--steps", "20").splitlines()[-1]
    figures = json.loads(last)
    assert list(figures) == ["4", "8"]
    assert all(us > 0 for us in figures.values())


def test_decode_model_times_a_model(tiny_dir):
    arguments = ("--dtypes", "float32", "--threads", "1", "--seconds", "0.01", "--json")
    last = run("benchmarks/decode_model.py", str(tiny_dir), *arguments).splitlines()[-1]
    assert json.loads(last)


@pytest.mark.multiprocess
@pytest.mark.parametrize("more", [(), pytest.param(("--all-to-all",), marks=pytest.mark.slow)])
def test_expert_balance_evens_ranks_out_and_changes_nothing(more):
    """Counted visits, not times: these figures are the same on every machine."""
    last = run("benchmarks/expert_balance.py", "--steps", "96", "--rows", "16", "--experts", "32", "--json", *more)
    figures = json.loads(last.splitlines()[-1])
    assert figures["updates"] > 0
    assert figures["moving_steps"] > 0
    assert figures["unbalanced"] > 1.25
    assert figures["after"] < 1.1
    assert figures["difference"] < 1e-4


@pytest.mark.model
@pytest.mark.multiprocess
def test_serving_measures_a_running_server(tmp_path):
    from xllm_models.hub import resolve_model

    from tests.support.server import ServerProcess

    directory = resolve_model("smollm2").path  # prompts are made of words, which the byte tokenizer does not have
    with ServerProcess(directory, tmp_path, "--max-cache-size", "200MiB", "--max-model-len", "1024") as server:
        load = ("-w", "d", "--shared", "32", "--unique", "8", "--output", "4", "--concurrency", "2", "--requests", "4")
        out = run("benchmarks/serving.py", "--url", server.url, "--model", directory.name, "--model-dir",
                  str(directory), "--rounds", "1", *load, "--json")
    figures = json.loads(out.splitlines()[-1])
    assert figures["benchmark"] == "serving"
    assert '"failed": 0' in json.dumps(figures)
