import pytest
from prometheus_client.parser import text_string_to_metric_families

from xllm_npu.metrics import HISTOGRAMS, Histogram, Metrics


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """(name, label value, ...) without the model's name -> value, as a Prometheus server reads them."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            assert sample.labels.get("model_name") == "m"
            found[sample.name, *(labels[name] for name in sorted(labels))] = sample.value
    return found


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics()
    metrics.set_model("m", [{"block_size": 128, "num_kv_blocks": 7}, {"block_size": 128, "num_kv_blocks": 8}])
    return metrics


def test_engine_statistics(metrics):
    metrics.set_engine(0, running=1, steps_total=7)
    metrics.set_engine(1, running=3, waiting=2, kv_usage=0.5, preemptions_total=4, prefix_queries_total=100,
                       prefix_hits_total=60, steps_total=1, prompt_tokens_total=50, generation_tokens_total=70,
                       last_step_tokens=9, last_step_seconds=0.1, graph_misses_total=1, prefill_graph_misses_total=6)
    got = samples(metrics)
    for name, value in {"num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.5,
                        "num_preemptions_total": 4, "prefix_cache_queries_total": 100, "prefix_cache_hits_total": 60,
                        "prompt_tokens_total": 50, "generation_tokens_total": 70, "engine_steps_total": 1,
                        "graph_misses_total": 1, "prefill_graph_misses_total": 6}.items():
        assert got["xllm_npu:" + name, "1"] == value, name
    assert got["xllm_npu:num_requests_running", "0"] == 1
    assert got["xllm_npu:engine_steps_total", "0"] == 7
    assert got["xllm_npu:cache_config_info", "128", "0", "7"] == got["xllm_npu:cache_config_info", "128", "1", "8"] == 1


def test_a_step_is_counted_once(metrics):
    for step, tokens in ((1, 5), (1, 5), (2, 100), (3, 0)):
        metrics.set_engine(0, steps_total=step, last_step_tokens=tokens)
    metrics.set_engine(1, steps_total=3, last_step_tokens=7)
    metrics.set_engine(1, steps_total=3, last_step_tokens=7)
    got = samples(metrics)
    assert got["xllm_npu:iteration_tokens_total_count",] == 3
    assert got["xllm_npu:iteration_tokens_total_sum",] == 112


def test_a_finished_request(metrics):
    metrics.on_first_token(0.2)
    metrics.on_queued(0.1, 0.1)
    metrics.on_tokens(4, 0.8)
    metrics.on_finished("length", prompt_tokens=10, generation_tokens=5, n=1, max_tokens=5, e2e_seconds=1.0,
                        first_token_seconds=0.2, queue_seconds=0.1)
    got = samples(metrics)
    assert got["xllm_npu:request_success_total", "length"] == 1
    assert got["xllm_npu:request_success_total", "stop"] == 0
    for name, count, total in (
            ("time_to_first_token_seconds", 1, 0.2), ("request_queue_time_seconds", 1, 0.1),
            ("inter_token_latency_seconds", 4, 0.8), ("request_time_per_output_token_seconds", 1, 0.2),
            ("e2e_request_latency_seconds", 1, 1.0), ("request_decode_time_seconds", 1, 0.8),
            ("request_inference_time_seconds", 1, 0.9), ("request_prompt_tokens", 1, 10),
            ("request_generation_tokens", 1, 5), ("request_params_n", 1, 1), ("request_params_max_tokens", 1, 5)):
        assert got[f"xllm_npu:{name}_count",] == count, name
        assert got[f"xllm_npu:{name}_sum",] == pytest.approx(total), name


def test_a_request_without_tokens(metrics):
    metrics.on_finished("abort", prompt_tokens=10, generation_tokens=0, n=1, max_tokens=None, e2e_seconds=1.0)
    got = samples(metrics)
    assert got["xllm_npu:request_success_total", "abort"] == 1
    assert got["xllm_npu:request_decode_time_seconds_count",] == 0
    assert got["xllm_npu:request_params_max_tokens_count",] == 0


def test_rejections(metrics):
    metrics.on_rejected("max_concurrent_requests")
    assert samples(metrics)["xllm_npu:admission_rejections_total", "max_concurrent_requests"] == 1


def test_buckets_are_cumulative_and_hold_their_bounds():
    histogram = Histogram((1.0, 2.0))
    for value, n in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 3)):
        histogram.observe(value, n)
    assert histogram.buckets() == [("1.0", 3), ("2.0", 4), ("+Inf", 7)]
    assert (histogram.count, histogram.sum) == (7, 31.0)


def test_bounds_rise():
    for name, _, bounds in HISTOGRAMS:
        assert list(bounds) == sorted(set(bounds)), name
