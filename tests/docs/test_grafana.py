"""The dashboard asks for metrics that exist, by labels that they have."""

import json
import re
from collections.abc import Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.docs.markdown import ROOT
from xllm_npu.metrics import Metrics

FILE = ROOT / "docs" / "grafana" / "xllm-npu.json"


def exposed() -> dict[str, set[str]]:
    """Every sample's name with its labels, of a server to which everything has happened."""
    metrics = Metrics()
    metrics.set_model("m", [{"block_size": 16}])
    metrics.set_engine(0, pages={"mapped": 1, "reserved": 1, "free": 1, "pinned": 1, "refusals": {"memory": 1}},
                       owned_pages={"weights": 1})
    metrics.on_rejected("max_queued_requests")
    metrics.on_transition("sleep", 0.1, "")
    metrics.on_transition("wake", 0.1, "memory")
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def queries() -> Iterator[tuple[str, str]]:
    dashboard: dict[str, Any] = json.loads(FILE.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def test_every_expression_names_metrics_and_labels_that_exist():
    have = exposed()
    asked = list(queries())
    assert len(asked) > 30
    for title, expression in asked:
        found = re.findall(r"(xllm_npu:\w+)(?:\{([^}]*)\})?", expression)
        assert found, title
        for name, selector in found:
            assert name in have, f"{title}: {name}"
            labels = set(re.findall(r"(\w+)\s*=~?", selector))
            grouping = {one.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for one in group.split(",")}
            assert labels | grouping <= have[name], f"{title}: {name} has {have[name]}"


def test_every_metric_is_shown_somewhere_or_is_a_detail():
    shown = {name for _, expression in queries() for name in re.findall(r"xllm_npu:\w+", expression)}
    details = {"cache_config_info", "prompt_tokens_by_source_total", "prompt_tokens_cached_total",
               "num_requests_waiting_by_reason", "request_params_n", "request_params_max_tokens",
               "request_inference_time_seconds", "request_time_per_output_token_seconds",
               "sleep_mode_operation_duration_seconds"}
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    missing = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exposed()} - stems
    assert {name.removeprefix("xllm_npu:") for name in missing} <= details


def test_panels_do_not_overlap():
    places = [panel["gridPos"] for panel in json.loads(FILE.read_text())["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
