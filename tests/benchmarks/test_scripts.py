"""The benchmark scripts run and print what they promise; their figures are nobody's assertion."""

import argparse
import json
import subprocess
import sys

import pytest


def run(*arguments: str, timeout: float = 200) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.slow
def test_host_step_ends_with_one_json_object():
    last = run("benchmarks/host_step.py", "--json", "--sizes", "4,8", "--steps", "20").splitlines()[-1]
    figures = json.loads(last)
    assert list(figures) == ["4", "8"]
    assert all(us > 0 for us in figures.values())


@pytest.mark.slow
def test_structured_output_times_masks(tiny_dir):
    arguments = ("--model", str(tiny_dir), "--rows", "3", "--steps", "4", "--json")
    figures = json.loads(run("benchmarks/structured_output.py", *arguments).splitlines()[-1])
    assert all(milliseconds > 0 for milliseconds in figures.values())
    assert {"compile", "masks, median", "tokens taken, median"} <= set(figures)


def test_json_schema_suite_writes_its_table(tmp_path):
    folder = tmp_path / "suite" / "tests" / "draft7"
    folder.mkdir(parents=True)
    tests = [{"description": "a", "data": 3, "valid": True}, {"description": "b", "data": "3", "valid": False}]
    groups = [{"description": "x", "schema": {"type": "integer"}, "tests": tests},
              {"description": "y", "schema": {"not": {}}, "tests": tests}]
    (folder / "type.json").write_text(json.dumps(groups))
    document = tmp_path / "document.md"
    document.write_text("a\n<!-- json-schema-suite: begin -->\nold\n<!-- json-schema-suite: end -->\nb\n")
    run("benchmarks/json_schema_suite.py", "--suite", str(tmp_path / "suite"), "--drafts", "draft7", "--write",
        str(document))
    text = document.read_text()
    assert "| type | 2 | 1 | 5 | 0 | unimplemented: [\"not\"] (1) |" in text
    assert text.startswith("a\n")
    assert text.endswith("b\n")
    assert "old" not in text


@pytest.mark.slow
def test_page_mapping_times_each_way():
    arguments = ("--platform", "cpu", "--layers", "2", "--rounds", "5", "--json")
    figures = json.loads(run("benchmarks/page_mapping.py", *arguments).splitlines()[-1])
    assert set(figures) == {"map", "map, slowest of ten", "unmap", "copy of as many bytes"}
    assert all(milliseconds > 0 for milliseconds in figures.values())


@pytest.mark.slow
def test_elastic_memory_compares_caches_and_times_sleep(tiny_dir):
    arguments = ("--model", str(tiny_dir), "--dtype", "float32", "--threads", "1", "--sequences", "3", "--tokens", "40",
                 "--rounds", "1", "--max-cache-size", "16MiB", "--page-bytes", "64KiB", "--json")
    figures = json.loads(run("benchmarks/elastic_memory.py", *arguments).splitlines()[-1])
    assert all(value > 0 for value in figures.values())
    assert {"elastic / physical, median", "sleep, level 1", "wake-up, level 2", "copy of as many bytes"} <= set(figures)


@pytest.mark.slow
def test_decode_model_times_a_model(tiny_dir):
    arguments = ("--dtypes", "float32", "--threads", "1", "--seconds", "0.01", "--json")
    last = run("benchmarks/decode_model.py", str(tiny_dir), *arguments).splitlines()[-1]
    assert json.loads(last)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("more", [(), ("--all-to-all",)])
def test_expert_balance_evens_ranks_out_and_changes_nothing(more):
    """Counted visits, not times: these figures are the same on every machine."""
    last = run("benchmarks/expert_balance.py", "--steps", "96", "--rows", "16", "--experts", "32", "--json", *more)
    figures = json.loads(last.splitlines()[-1])
    assert figures["updates"] > 0
    assert figures["moving_steps"] > 0
    assert figures["unbalanced"] > 1.25
    assert figures["after"] < 1.1
    assert figures["difference"] < 1e-4


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_device_check_runs_dry(tmp_path):
    """Every part gives findings on the CPU, and the report has them all."""
    out = run("benchmarks/device_check.py", "--dry-run", "--output", str(tmp_path), timeout=550)
    (file,) = tmp_path.iterdir()
    report = json.loads(file.read_text())
    assert list(report["parts"]) == ["contract", "kernels", "greedy", "engine", "decode", "serving"]
    for name, part in report["parts"].items():
        assert part["status"] == "passed", (name, part)
        assert part["findings"]
        assert name in out


def test_device_check_keeps_what_a_part_found_before_it_failed(tmp_path, monkeypatch):
    """A part that dies, one that hangs and one that needs what is not there leave the others alone."""
    monkeypatch.syspath_prepend("benchmarks")
    import device_check

    parts = tmp_path / "device_check_parts"
    parts.mkdir()
    found = 'print(\'@ {"name": "one", "ok": true}\', flush=True)\n'
    (parts / "check_dies.py").write_text(found + "raise SystemExit('no memory')\n")
    (parts / "check_hangs.py").write_text(found + "import threading\nthreading.Event().wait()\n")
    (parts / "check_wrong.py").write_text('print(\'@ {"name": "one", "ok": false}\')\n')
    (parts / "check_works.py").write_text(found)
    monkeypatch.setattr(device_check, "HERE", tmp_path)
    monkeypatch.setattr(device_check, "GRACE", 0.5)
    arguments = argparse.Namespace(platform="cpu", dry_run=True)
    results = {name: device_check.run_part(device_check.Part(name, 1, needs), arguments, 1.0)
               for name, needs in (("dies", ()), ("hangs", ()), ("wrong", ()), ("works", ()), ("lacks", ("no_such",)))}
    assert {name: result["status"] for name, result in results.items()} == {
        "dies": "failed", "hangs": "timeout", "wrong": "failed", "works": "passed", "lacks": "skipped"}
    assert results["dies"]["findings"] == results["hangs"]["findings"] == [{"name": "one", "ok": True}]
    assert "no memory" in results["dies"]["reason"]
    assert "no_such" in results["lacks"]["reason"]
