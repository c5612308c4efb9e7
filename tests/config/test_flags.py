"""How flags are spelled, which other names they have, and what is said about wrong ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xllm_npu.config.aliases import ALIASES
from xllm_npu.config.errors import SettingsError
from xllm_npu.config.load import load_settings
from xllm_npu.config.settings import setting_fields
from xllm_npu.config.unsupported import UNSUPPORTED


def problem(*argv, **environment):
    with pytest.raises(SettingsError) as caught:
        load_settings(argv, environment)
    return "\n".join(caught.value.problems)


def value(name, *argv):
    loaded = load_settings(argv, {})
    return getattr(getattr(loaded, setting_fields()[name].section), name)


EXAMPLES = {
    "max_tokens_per_batch": "77", "enable_online_preempt_offline": "false", "priority_strategy": "sjf",
    "max_num_batched_tokens": "77", "gpu_memory_utilization": "0.5", "xxh3_128bits_seed": "3",
}  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(EXAMPLES)), st.data())
def test_any_mix_of_dashes_and_underscores_parses_the_same(name, data):
    signs = data.draw(st.lists(st.sampled_from("-_"), min_size=name.count("_"), max_size=name.count("_")))
    parts = name.split("_")
    spelled = parts[0] + "".join(sign + part for sign, part in zip(signs, parts[1:], strict=True))
    words = data.draw(st.sampled_from([[f"--{spelled}={EXAMPLES[name]}"], [f"--{spelled}", EXAMPLES[name]]]))
    assert load_settings(words, {}) == load_settings([f"--{name}={EXAMPLES[name]}"], {})
    assert load_settings(words, {}) != load_settings([], {})


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--enable-graph"], True), (["--enable_graph=true"], True), (["--enable-graph", "false"], False),
     (["--enable-graph=0"], False), (["--no-enable-graph"], False), (["--no_enable_graph"], False),
     (["--enable-graph", "TRUE", "model"], True), (["--enable-graph", "model"], True)],
)  # fmt: skip
def test_boolean_spellings(words, expected):
    assert value("enable_graph", *words) is expected


def test_a_boolean_does_not_eat_the_model():
    assert value("model", "--enable-graph", "model") == "model"
    assert value("model", "--enable-graph", "false", "model") == "model"
    assert value("model", "--", "--odd") == "--odd"


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        ("--max-num-seqs 3", "max_seqs_per_batch", 3),
        ("--max-num-batched-tokens 4k", "max_tokens_per_batch", 4000),
        ("--max-model-len 32K", "max_model_len", 32768),
        ("--max-model-len auto", "max_model_len", None),
        ("--max-model-len -1", "max_model_len", None),
        ("--gpu-memory-utilization .5", "max_memory_utilization", 0.5),
        ("--kv-cache-memory-bytes 2GiB", "max_cache_size", 2 * 2**30),
        ("--max_cache_size 2GB", "max_cache_size", 2 * 10**9),
        ("--max_cache_size 1.5g", "max_cache_size", 3 * 2**29),
        ("--max_cache_size 12345", "max_cache_size", 12345),
        ("--enable-prefix-caching=false", "enable_prefix_cache", False),
        ("--no-enable-prefix-caching", "enable_prefix_cache", False),
        ("--disable-radix-cache", "enable_prefix_cache", False),
        ("--no-async-scheduling", "enable_schedule_overlap", False),
        ("--enforce-eager=false", "enable_graph", True),
        ("--enforce-eager", "enable_graph", False),
        ("--scheduling-policy priority", "priority_strategy", "priority"),
        ("--scheduling-policy fcfs", "scheduling_policy", "decode_first"),
        ("--scheduling_policy=Unified", "scheduling_policy", "unified"),
        ("--use_mix_scheduler", "scheduling_policy", "unified"),
        ("--enable_mix_batch=false", "scheduling_policy", "prefill_first"),
        ("--devices npu:3", "device_id", 3),
        ("--devices npu:3", "platform", "npu"),
        ("--seed 5", "random_seed", 5),
        ("--random_seed -1", "random_seed", -1),
        ("--device_id -1", "device_id", -1),
        ("--disable-log-requests", "enable_request_logging", False),
        ("--enable-log-requests", "enable_request_logging", True),
        ("--dtype half", "dtype", "float16"),
        ("--dtype torch.bfloat16", "dtype", "bfloat16"),
        ("--generation-config vllm", "generation_config", "none"),
        ("--model-impl Transformers", "model_impl", "transformers"),
        ("--model-impl vllm", "model_impl", "native"),
        ("--model_impl python", "model_impl", "auto"),
        ("--model_impl py", "model_impl", "auto"),
        ("--load-format dummy", "load_format", "dummy"),
        ("--load-format safetensors", "load_format", "safetensors"),
        ("-tp 1", "tp_size", 1),
        ("--tensor-parallel-size=1", "tp_size", 1),
        ("--api-key a,b --api-key c", "api_key", ("a", "b", "c")),
        ('--allowed-origins ["*"]', "allowed_origins", ("*",)),
        ("--graph-batch-sizes 8,1,4,1", "graph_batch_sizes", (1, 4, 8)),
        ("--port 1 --port 2", "port", 2),
        ("--port 1 --no-enable-graph --model= m", "model", "m"),
    ],
)
def test_names_and_values(words, name, expected):
    if "--model=" in words:
        assert "--model needs" in problem("--model")
        assert "--model= takes" in problem("--model=")
        return
    assert value(name, *words.split()) == expected


def test_two_names_that_disagree_are_refused():
    text = problem("--max-num-seqs", "8", "--max_seqs_per_batch=9")
    assert "--max-num-seqs" in text
    assert "--max_seqs_per_batch" in text
    assert "8 and 9" in text
    assert value("max_seqs_per_batch", "--max-num-seqs=8", "--max-seqs-per-batch=8") == 8
    assert "--enable-graph" in problem("--enforce-eager", "--enable-graph")
    assert "MODEL and --model" in problem("a", "--model", "b")
    assert "XLLM_NPU_SEED" in problem(XLLM_NPU_SEED="1", XLLM_NPU_RANDOM_SEED="2")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("--prot", "--port"), ("--max-num-seq", "--max-num-seqs"), ("--enable-chunk-prefill", "--enable-chunked-prefill"),
     ("--no-enable-prefix-cach", "--enable-prefix-cache"), ("--max_tokens_per_bacth", "--max-tokens-per-batch"),
     ("-port", "--port"), ("--utilization", "--max-memory-utilization")],
)  # fmt: skip
def test_unknown_flag_names_the_nearest(wrong, right):
    text = problem(wrong, "7")
    assert text == f"There is no flag {wrong}. Did you mean {right}?"


def test_every_unknown_flag_is_reported_at_once():
    assert len(problem("--prot", "1", "--hots=x").splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--port 70000", "--port=70000 is out of range: it takes 0 to 65535."),
        ("--gpu-memory-utilization=1.5", "--gpu-memory-utilization=1.5 is out of range: it takes 0 to 1."),
        ("--max_memory_utilization nan", "--max_memory_utilization=nan takes a finite number."),
        ("--block-size x", "--block-size=x takes a whole number."),
        ("--dtype int4", "--dtype=int4 is not one of auto, float32, bfloat16, float16."),
        ("--max-cache-size 3X", "--max-cache-size takes a size such as 536870912, 512MiB or 2GiB, got '3X'."),
        ("--enable-graph=maybe", "--enable-graph=maybe takes true or false."),
        ("--enforce-eager=maybe", "--enforce-eager takes true or false, got 'maybe'."),
        ("--port", "--port needs a value: --port VALUE or --port=VALUE."),
        ("--port --host x", "--port needs a value: --port VALUE or --port=VALUE."),
        ("--no-enable-graph=true", "--no-enable-graph takes no value; write --enable-graph=true."),
        ("a b", "One MODEL is enough"),
        ("--devices npu:0,npu:1", "--devices takes one device"),
        ("--graph-batch-sizes 0,4", "--graph-batch-sizes takes batch sizes from 1 to 65536, got 0,4."),
    ],
)
def test_wrong_values_name_flag_value_and_range(words, said):
    assert said in problem(*words.split())


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_known_names_are_accepted_only_where_they_ask_for_nothing(name):
    for neutral in UNSUPPORTED[name]:
        spelled = str(neutral).lower() if isinstance(neutral, bool) else neutral
        assert load_settings([f"--{name}={spelled}"], {}) == load_settings([], {})
    if len(UNSUPPORTED[name]) == 1 or not isinstance(UNSUPPORTED[name][0], bool):
        other = str(not UNSUPPORTED[name][0]).lower() if isinstance(UNSUPPORTED[name][0], bool) else "987"
        assert f"--{name}" in problem(f"--{name}={other}")


def test_unsupported_switches():
    assert problem("--enable_disagg_pd") == "--enable_disagg_pd is not available in this version."
    assert "never run" in problem("--trust-remote-code")
    assert load_settings(["--no-enable-lora", "m"], {}).model.model == "m"
    assert "-pp=2" in problem("-pp", "2")


def test_every_name_means_one_thing():
    fields = setting_fields()
    assert not set(fields) & set(ALIASES)
    assert not set(fields) & set(UNSUPPORTED)
    assert not set(ALIASES) & set(UNSUPPORTED)
    assert all(alias.target in fields for alias in ALIASES.values())
    assert all(info.info.description for info in fields.values())
    for name, alias in ALIASES.items():
        assert alias.boolean or not fields[alias.target].boolean, name


def test_secrets_are_masked_everywhere():
    loaded = load_settings(["--api-key", "sk-hidden"], {})
    shown = [repr(loaded), str(loaded), repr(loaded.service), repr(loaded.service.api_key),
             loaded.model_dump_json(), str(loaded.model_dump()), f"{loaded.service.api_key}"]  # fmt: skip
    assert not any("sk-hidden" in text for text in shown)
    assert "sk hidden" not in problem("--api-key", "sk hidden")
    assert loaded.service.api_key[0] == "sk-hidden"
