"""The verbs: exit codes, what goes to stdout, what is imported, and one sentence for every failure."""

import io
import json
import re
import subprocess
import sys
import types

import pytest

from xllm_npu import cli
from xllm_npu.config.aliases import ALIASES
from xllm_npu.config.settings import setting_fields
from xllm_npu.config.unsupported import UNSUPPORTED
from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.version import __version__


class FakeLLM:
    """Answers each prompt with its own text in capitals; remembers how it was asked."""

    made: list["FakeLLM"] = []

    def __init__(self, **settings):
        self.settings, self.calls, self.closed = settings, [], False
        self.info = types.SimpleNamespace(
            model_name="tiny", platform="cpu", device="a CPU", dtype="float32", vocab_size=50
        )
        FakeLLM.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.closed = True

    def generate(self, prompts, params, use_tqdm=True):
        self.calls.append((prompts, params))
        return [self._answer(prompt) for prompt in prompts]

    def chat(self, conversations, params):
        return self.generate([conversation[-1]["content"] for conversation in conversations], params)

    def _answer(self, prompt):
        if prompt == "fail":
            return types.SimpleNamespace(outputs=[], prompt_token_ids=[1], error="the engine is gone")
        output = types.SimpleNamespace(text=str(prompt).upper(), finish_reason="stop", token_ids=[1, 2])
        return types.SimpleNamespace(outputs=[output], prompt_token_ids=[1, 2, 3], error=None)


@pytest.fixture
def fake_llm(monkeypatch):
    FakeLLM.made = []
    monkeypatch.setitem(sys.modules, "xllm_npu.llm", types.SimpleNamespace(LLM=FakeLLM))
    return FakeLLM


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("XLLM_NPU_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["config"], ["serve", "--help"], ["serv"]])
def test_light_verbs_import_nothing_heavy(words):
    code = (
        "import sys\nfrom xllm_npu import cli\n"
        f"code = cli.main({words!r})\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'numba', 'numpy', 'uvicorn'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if words == ["serv"] else 0), done.stderr
    assert "imported" not in done.stderr


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_help_fits_80_columns_and_names_its_flags(verb, capsys):
    assert cli.main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert cli.main(["help", verb]) == 0
    assert capsys.readouterr().out == text
    assert "--json-output" not in text
    sections = cli.VERBS[verb].sections
    for name, field in setting_fields().items():
        assert (f"  --{name.replace('_', '-')}" in text) == (sections is None or field.section in sections)


def test_help_shows_defaults_and_aliases(capsys):
    cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    assert re.search(r"--max-seqs-per-batch N\n +sequences in one step \[1024\] \(also --max-num-seqs", text)
    assert "[8000]" in text
    assert "32MiB" in text
    assert "[on]" in text


def test_verb_flags_have_names_of_their_own():
    taken = set(setting_fields()) | set(ALIASES) | set(UNSUPPORTED)
    for verb in cli.VERBS.values():
        assert not taken & set(verb.options.model_fields)
        assert all(info.description for info in verb.options.model_fields.values())


def test_version_and_overview(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"xllm-npu {__version__}\n"
    assert cli.main([]) == 2
    overview = capsys.readouterr().out
    assert all(verb in overview for verb in ("serve", "generate", "bench", "pull", "doctor"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serv"], "There is no verb serv. Did you mean serve?"),
        (["--port", "1"], "A verb comes first: xllm-npu serve --port"),
        (["serve", "--prot", "1"], "There is no flag --prot. Did you mean --port?"),
        (["generate", "--temprature", "1"], "Did you mean --temperature?"),
        (["generate", "--temperature", "3", "--prompt", "x"], "--temperature=3 is out of range: it takes 0 to 2."),
        (["bench", "--prompt", "x"], "There is no flag --prompt"),
        (["serve", "--enable_disagg_pd"], "--enable_disagg_pd is not available in this version."),
    ],
)
def test_wrong_command_lines_exit_with_2_and_one_sentence(words, said, capsys):
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""
    assert "Traceback" not in shown.err
    assert all(line.startswith("xllm-npu: error: ") for line in shown.err.splitlines())


def test_config_prints_values_and_sources(capsys, monkeypatch):
    monkeypatch.setenv("XLLM_NPU_API_KEY", "sk-hidden")
    assert cli.main(["config", "--max-num-seqs", "7", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["max_seqs_per_batch"]["value"] == 7
    assert rows["api_key"] == {"section": "service", "value": ["********"], "source": "environment",
                               "given_as": "XLLM_NPU_API_KEY"}  # fmt: skip
    assert cli.main(["config"]) == 0
    assert "sk-hidden" not in capsys.readouterr().out


def test_serve_hands_over_the_settings_and_its_exit_code(monkeypatch, capsys, tmp_path):
    seen = []
    server = types.SimpleNamespace(run_server=lambda settings: seen.append(settings) or 7)
    monkeypatch.setitem(sys.modules, "xllm_npu.service.server", server)
    dump = tmp_path / "d.json"
    words = ["serve", "m", "--port=5", "--enable-dump-config-json", f"--dump-config-json-file={dump}"]
    assert cli.main(words) == 7
    assert [(one.model.model, one.service.port) for one in seen[0]] == [("m", 5)]
    assert json.loads(dump.read_text()) == {"model": "m", "port": 5}


def test_serve_takes_several_models_and_the_rest_does_not(monkeypatch, capsys):
    seen = []
    server = types.SimpleNamespace(run_server=lambda settings: seen.extend(settings) or 0)
    monkeypatch.setitem(sys.modules, "xllm_npu.service.server", server)
    assert cli.main(["serve", "a", "b", "--max-cache-size=1MiB"]) == 0
    assert [one.model.model for one in seen] == ["a", "b"]
    for verb in ("generate", "bench", "pull"):
        assert cli.main([verb, "a", "b", "--max-cache-size=1MiB"]) == 2
        assert "One MODEL is enough, got a and b: only a server takes several." in capsys.readouterr().err
    assert "[MODEL ...]" in help_of("serve", capsys)
    assert "[MODEL]" in help_of("generate", capsys)


def help_of(verb: str, capsys) -> str:
    assert cli.main([verb, "--help"]) == 0
    return capsys.readouterr().out


def test_serve_says_first_what_is_wrong_with_the_machine(monkeypatch, capsys):
    from xllm_npu.doctor import examination
    from xllm_npu.doctor.finding import Finding

    look = [Finding("ok", "a", "fine", "yes"), Finding("problem", "b", "driver", "old", "it hangs", "renew it")]
    monkeypatch.setattr(examination, "quick_look", lambda settings: look)
    monkeypatch.setitem(sys.modules, "xllm_npu.service.server", types.SimpleNamespace(run_server=lambda settings: 0))
    assert cli.main(["serve", "m"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" W doctor: driver: old; it hangs; renew it")


def test_generate_prints_text_only(fake_llm, capsys):
    words = ["generate", "m", "--prompt", "one, two", "--max-tokens=3", "--temperature", "0.5", "--stop", "a,b"]
    assert cli.main([*words, "--max-model-len", "64"]) == 0
    assert capsys.readouterr().out == "ONE, TWO\n"
    (llm,) = fake_llm.made
    assert llm.settings == {"model": "m", "max_model_len": 64}
    prompts, params = llm.calls[0]
    assert prompts == ["one, two"]
    assert (params.max_tokens, params.temperature, params.stop) == (3, 0.5, ("a,b",))
    assert llm.closed


def test_generate_several_prompts_and_json(fake_llm, capsys):
    assert cli.main(["generate", "--prompt", "a", "--prompt=b"]) == 0
    assert capsys.readouterr().out == "--- 1\nA\n--- 2\nB\n"
    assert cli.main(["generate", "--prompt", "a", "--chat", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record == {"prompt": "a", "text": "A", "finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 2}


def test_generate_reads_standard_input(fake_llm, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a long prompt\n"))
    assert cli.main(["generate"]) == 0
    assert capsys.readouterr().out == "A LONG PROMPT\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert cli.main(["generate"]) == 2
    assert "Standard input is empty" in capsys.readouterr().err


def test_generate_reports_a_request_that_failed(fake_llm, capsys):
    assert cli.main(["generate", "--prompt", "fail"]) == 1
    assert "xllm-npu: error: the engine is gone" in capsys.readouterr().err


def test_our_errors_are_sentences_and_foreign_ones_keep_their_traceback(fake_llm, capsys, monkeypatch):
    def refuse(self, *args):
        raise InvalidParameter("prompt", "The prompt is too long.")

    monkeypatch.setattr(FakeLLM, "generate", refuse)
    assert cli.main(["generate", "--prompt", "a"]) == 1
    assert capsys.readouterr().err == "xllm-npu: error: The prompt is too long.\n"
    monkeypatch.setattr(FakeLLM, "generate", lambda self, *args: {}["bug"])
    with pytest.raises(KeyError):
        cli.main(["generate", "--prompt", "a"])


def test_interrupt_exits_with_130(fake_llm, monkeypatch):
    def interrupt(self, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeLLM, "generate", interrupt)
    assert cli.main(["generate", "--prompt", "a"]) == 130


def test_bench_measures_fresh_prompts_of_the_asked_size(fake_llm, capsys):
    words = ["bench", "--batch-size=2", "--input-len=5", "--output-len=4", "--repeats=2"]
    assert cli.main([*words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["prefill_tokens_per_second"] > 0
    assert figures["decode_tokens_per_second"] > 0
    calls = fake_llm.made[0].calls
    assert [params.max_tokens for _, params in calls] == [2, 1, 1, 4, 4]
    assert all(params.ignore_eos for _, params in calls)
    assert all([len(p) for p in prompts] == [5, 5] for prompts, _ in calls)
    assert len({str(prompts) for prompts, _ in calls}) == len(calls)
    assert cli.main(words) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_pull_prints_the_path(monkeypatch, capsys, tmp_path):
    from xllm_models import hub

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(hub, "resolve_model", lambda model, **kw: types.SimpleNamespace(path=f"{tmp_path}/{model}"))
    assert cli.main(["pull", "org/name", "--revision", "r"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/org/name\n"
    assert cli.main(["pull", "--list-pulled", "--download-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""


def test_pull_of_what_is_not_there_is_one_sentence(capsys):
    assert cli.main(["pull", "./nowhere-at-all"]) == 1
    assert "nowhere-at-all" in capsys.readouterr().err


def test_doctor_finds_this_machine_usable(capsys):
    assert cli.main(["doctor", "--json", "--port", "0"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"ok"} == {f["mark"] for f in findings if f["what"] == "platform cpu"}
    assert all(f["found"] for f in findings)


@pytest.mark.parametrize("platform", ["cuda", "warp"])
def test_doctor_fails_if_no_platform_or_not_the_asked_one_works(platform, capsys, monkeypatch):
    from xllm_platform import registry
    from xllm_platform.base import Availability

    monkeypatch.setattr(registry, "probe_all", lambda: {"cuda": Availability(False, "no driver")})
    assert cli.main(["doctor", "--port=0", "--platform", platform]) == 1
    assert "problem platform" in capsys.readouterr().out
    assert cli.main(["doctor", "--port=0"]) == 1
    assert "none can be used" in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_traceback():
    code = "import sys; from xllm_npu import cli; sys.exit(cli.main(['config']))"
    command = f'"{sys.executable}" -c "{code}" | true'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
