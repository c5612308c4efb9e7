"""`xllm-npu VERB ...`: reads the settings, does what the verb says, turns failures into one sentence.

Exit codes: 0 done, 1 it could not be done, 2 the command line is wrong, 130 interrupted. Results go to stdout, all
else to stderr. Everything heavy is imported by the verb that needs it: help, version and config start without torch.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from xllm_npu.config import help as help_text
from xllm_npu.config import report
from xllm_npu.config.errors import SettingsError
from xllm_npu.config.load import Loaded, load
from xllm_npu.config.section import Section
from xllm_npu.config.values import Metavar
from xllm_npu.log import setup_logging
from xllm_npu.version import __version__

if TYPE_CHECKING:
    from xllm_npu.llm import LLM

PROGRAM = "xllm-npu"
DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130
ENGINE_SECTIONS = ("model", "kv_cache", "scheduler", "execution", "profile", "parallel", "files")

Texts = Annotated[tuple[str, ...], Metavar("TEXT")]


class ServeOptions(Section):
    """Serve"""


class GenerateOptions(Section):
    """Generate"""

    prompt: Texts = Field(default=(), description="what to continue; repeatable; without it, standard input")
    chat: bool = Field(default=False, description="take each prompt as a user's message: apply the chat template")
    max_tokens: int = Field(default=128, ge=1, le=2**24, description="tokens to generate at most")
    temperature: float = Field(default=0.0, ge=0, le=2, description="0 takes the likeliest token")
    top_p: float = Field(default=1.0, gt=0, le=1, description="smallest set of tokens with this probability")
    top_k: int = Field(default=0, ge=-1, le=2**24, description="most likely tokens to draw from; 0: all")
    min_p: float = Field(default=0.0, ge=0, le=1, description="least probability, as a share of the likeliest's")
    repetition_penalty: float = Field(default=1.0, gt=0, le=100, description="above 1 avoids tokens seen before")
    stop: Texts = Field(default=(), description="text that ends the output; repeatable")
    ignore_eos: bool = Field(default=False, description="go on past the model's end token")
    json_output: bool = Field(default=False, description="print a JSON list, with token counts and finish reasons")


class BenchOptions(Section):
    """Bench"""

    batch_size: int = Field(default=8, ge=1, le=65536, description="prompts at once")
    input_len: int = Field(default=128, ge=1, le=2**24, description="tokens of each prompt, drawn at random")
    output_len: int = Field(default=128, ge=2, le=2**24, description="tokens to generate for each")
    repeats: int = Field(default=3, ge=1, le=1000, description="measurements; their median is shown")
    json_output: bool = Field(default=False, description="print one JSON object")


class PullOptions(Section):
    """Pull"""

    list_pulled: bool = Field(default=False, description="list the models in this program's own cache instead")


class ReportOptions(Section):
    """Output"""

    json_output: bool = Field(default=False, description="print JSON")


@dataclass(frozen=True, slots=True)
class Verb:
    summary: str
    run: Callable[[Loaded, Any], int]
    options: type[Section]
    sections: tuple[str, ...] | None = None  # what its help shows; None: all
    several_models: bool = False  # whether it takes more than one


def main(argv: Sequence[str] | None = None) -> int:
    """The process's exit code. Raises nothing but bugs, with their traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    # A vendor's extension of torch that cannot be loaded must not end a process that does not need it; platforms load
    # their own.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # a reader that has gone must be noticed here, not when the interpreter ends
        return code
    except SettingsError as error:
        for problem in error.problems:
            _complain(problem)
        return WRONG_USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; keep the interpreter from failing again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        # Our own exceptions are written for users. A library's would say little without its traceback.
        if not type(error).__module__.startswith(("xllm_npu.", "xllm_models.", "xllm_platform.")):
            raise
        _complain(str(error))
        return FAILED


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        verb = VERBS.get(words[1]) if len(words) > 1 and words[0] == "help" else None
        print(_verb_help(words[1], verb) if verb else _overview(), end="")
        return DONE if words else WRONG_USAGE
    if words[0] in ("-V", "--version", "version"):
        print(f"{PROGRAM} {__version__}")
        return DONE
    name, rest = words[0], words[1:]
    if name not in VERBS:
        raise SettingsError(_no_such_verb(name))
    until = rest.index("--") if "--" in rest else len(rest)
    if "-h" in rest[:until] or "--help" in rest[:until]:
        print(_verb_help(name, VERBS[name]), end="")
        return DONE
    # --json is what people type; the option cannot have that name in a pydantic model.
    rest[:until] = ["--json-output" if word == "--json" else word for word in rest[:until]]
    loaded, options = load(rest, options=VERBS[name].options, several_models=VERBS[name].several_models)
    return VERBS[name].run(loaded, options)


def _no_such_verb(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, VERBS, n=1)
    if name.startswith("-"):
        return f"A verb comes first: {PROGRAM} serve {name} ..."
    return f"There is no verb {name}." + (
        f" Did you mean {close[0]}?" if close else f" It is one of {', '.join(VERBS)}."
    )


def _overview() -> str:
    verbs = "".join(f"  {name:<10}{verb.summary}\n" for name, verb in VERBS.items())
    return (
        f"Usage: {PROGRAM} VERB [MODEL] [FLAGS]\n\nLLM inference for Ascend NPU servers, GPUs and CPUs.\n\n"
        f"{verbs}\n{PROGRAM} VERB --help lists the verb's flags; {PROGRAM} --version is {__version__}.\n"
    )


def _verb_help(name: str, verb: Verb) -> str:
    own = help_text.section_help(verb.options).replace("--json-output", "--json") + "\n"
    body = help_text.settings_help(verb.sections)
    models = "[MODEL ...]" if verb.several_models else "[MODEL]"
    return (
        f"Usage: {PROGRAM} {name} {models} [FLAGS]\n\n{verb.summary}.\n\n{help_text.SPELLING_NOTES}\n\n"
        f"{own if verb.options.model_fields else ''}{body}"
    )


def _complain(sentence: str) -> None:
    print(f"{PROGRAM}: error: {sentence}", file=sys.stderr)


def _prepare(loaded: Loaded) -> None:
    setup_logging(loaded.settings.service.log_level, form=loaded.settings.service.log_format)
    path = report.dump_if_asked(loaded.models)
    if path is not None:
        print(f"settings written to {path}", file=sys.stderr)


def _serve(loaded: Loaded, options: ServeOptions) -> int:
    _prepare(loaded)
    _look_around(loaded)
    if loaded.settings.distributed.node_rank > 0:  # of one model: config refuses several on several machines
        from xllm_npu.master.cluster.serve_node import run_node

        return run_node(loaded.settings)
    from xllm_npu.service.server import run_server

    return run_server(loaded.models)


def _look_around(loaded: Loaded) -> None:
    """Logs what `doctor` would find at a glance, where there is something to do about it."""
    from xllm_npu.doctor.examination import quick_look

    for finding in quick_look(loaded.settings):
        if finding.mark != "ok":
            logging.getLogger("xllm_npu.doctor").warning(finding.sentence())


def _generate(loaded: Loaded, options: GenerateOptions) -> int:
    _prepare(loaded)
    prompts = list(options.prompt) or [_standard_input()]
    from xllm_npu.llm import LLM
    from xllm_npu.state.sampling_params import SamplingParams

    fields = options.model_dump(exclude={"prompt", "chat", "json_output"})
    params = SamplingParams(**fields)
    params.check()
    with LLM(**loaded.given()) as llm:
        if options.chat:
            results = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
        else:
            results = llm.generate(prompts, params)
    failures = [result.error for result in results if result.error]
    for failure in failures:
        _complain(failure)
    if options.json_output:
        print(json.dumps([_as_record(*pair) for pair in zip(prompts, results)], ensure_ascii=False, indent=2))
    else:
        for number, result in enumerate(results, 1):
            if len(results) > 1:
                print(f"--- {number}")
            print(result.outputs[0].text if result.outputs else "")
    return FAILED if failures else DONE


def _as_record(prompt: str, result: Any) -> dict[str, Any]:
    output = result.outputs[0] if result.outputs else None
    return {
        "prompt": prompt,
        "text": output.text if output else "",
        "finish_reason": output.finish_reason if output else "error",
        "prompt_tokens": len(result.prompt_token_ids),
        "completion_tokens": len(output.token_ids) if output else 0,
    }


def _standard_input() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise SettingsError('There is no prompt: give --prompt "...", or pipe it in.')
    text = sys.stdin.read().rstrip("\n")
    if not text:
        raise SettingsError("Standard input is empty: it should hold the prompt.")
    return text


def _bench(loaded: Loaded, options: BenchOptions) -> int:
    _prepare(loaded)
    from xllm_npu.llm import LLM

    with LLM(**loaded.given()) as llm:
        figures = _measure(llm, options)
    if options.json_output:
        print(json.dumps(figures))
        return DONE
    print(f"{figures['model']} on {figures['device']}, {figures['dtype']}")
    print(f"{options.batch_size} prompts of {options.input_len} tokens, {options.output_len} tokens each")
    print(f"prefill {figures['prefill_tokens_per_second']:>10,.1f} tokens/s")
    print(f"decode  {figures['decode_tokens_per_second']:>10,.1f} tokens/s")
    print(f"step    {figures['decode_step_ms']:>10,.2f} ms a decode step")
    print(f"total   {figures['total_seconds']:>10,.2f} s")
    return DONE


def _measure(llm: LLM, options: BenchOptions) -> dict[str, Any]:
    """Prefill is a run that stops at its first token; decode is what a whole run takes longer than that."""
    import random

    draw = random.Random(0)
    _time_run(llm, draw, options, 2)  # compiles and allocates what the first request would pay for
    prefill = statistics.median(_time_run(llm, draw, options, 1) for _ in range(options.repeats))
    total = statistics.median(_time_run(llm, draw, options, options.output_len) for _ in range(options.repeats))
    steps, decode = options.output_len - 1, max(total - prefill, 1e-9)
    return {
        "model": llm.info.model_name,
        "platform": llm.info.platform,
        "device": llm.info.device,
        "dtype": llm.info.dtype,
        **options.model_dump(exclude={"json_output"}),
        "prefill_tokens_per_second": options.batch_size * options.input_len / prefill,
        "decode_tokens_per_second": options.batch_size * steps / decode,
        "decode_step_ms": decode / steps * 1e3,
        "total_seconds": total,
    }


def _time_run(llm: LLM, draw: Any, options: BenchOptions, output_len: int) -> float:
    from xllm_npu.state.sampling_params import SamplingParams

    # New tokens each time: the prefix cache must not have seen them.
    prompts = [
        [draw.randrange(llm.info.vocab_size) for _ in range(options.input_len)] for _ in range(options.batch_size)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def _pull(loaded: Loaded, options: PullOptions) -> int:
    from xllm_models import hub

    model = loaded.settings.model
    if options.list_pulled:
        for pulled in hub.list_pulled(model.download_dir):
            print(f"{pulled.name}  {pulled.bytes / 2**20:,.0f} MiB  {pulled.path}")
        return DONE
    resolved = hub.resolve_model(
        model.model,
        use_modelscope=model.use_modelscope,
        revision=model.revision,
        cache_dir=model.download_dir,
        progress=_pull_progress(),
    )
    print(resolved.path)
    return DONE


def _pull_progress() -> Callable[[str, int, int], None]:
    shown = ""

    def show(stage: str, done: int, total: int) -> None:
        nonlocal shown
        if sys.stderr.isatty():
            share = f" {done * 100 // total}%" if total else f" {done / 2**20:,.0f} MiB"
            print(f"\r\x1b[K{stage}{share}", end="\n" if total and done >= total else "", file=sys.stderr, flush=True)
        elif stage != shown:
            print(stage, file=sys.stderr)
        shown = stage

    return show


def _config(loaded: Loaded, options: ReportOptions) -> int:
    print(
        report.as_json(loaded) if options.json_output else report.table(loaded), end="\n" if options.json_output else ""
    )
    report.dump_if_asked(loaded.models)
    return DONE


def _doctor(loaded: Loaded, options: ReportOptions) -> int:
    from xllm_npu.doctor.examination import examine
    from xllm_npu.doctor.finding import can_serve

    findings = examine(loaded.settings, other_models=loaded.others)
    if options.json_output:
        print(json.dumps([asdict(finding) for finding in findings], ensure_ascii=False, indent=2))
    else:
        print("\n".join(finding.text() for finding in findings))
    return DONE if can_serve(findings) else FAILED


def _kernels(loaded: Loaded, options: ReportOptions) -> int:
    from xllm_kernels_npu import figures

    found = figures.load()
    if options.json_output:
        print(figures.dump(found), end="")
        return DONE
    rows = figures.table(found)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        left, right = row[:3], row[3:]  # names, numbers
        cells = [*map(str.ljust, left, widths), *map(str.rjust, right, widths[3:])]
        print("  ".join(cells).rstrip())
    return DONE


VERBS: dict[str, Verb] = {
    "serve": Verb("Serve models over the OpenAI HTTP API", _serve, ServeOptions, several_models=True),
    "generate": Verb("Generate text in this process", _generate, GenerateOptions, ENGINE_SECTIONS),
    "bench": Verb("Measure prefill and decode in this process", _bench, BenchOptions, ENGINE_SECTIONS),
    "pull": Verb("Get a model and print where it lies", _pull, PullOptions, ("model",)),
    "config": Verb("Print every setting and where it came from", _config, ReportOptions, several_models=True),
    "doctor": Verb(
        "Say whether this machine can serve, and what is missing", _doctor, ReportOptions, several_models=True
    ),
    "kernels": Verb("List the Ascend kernels with the on-chip memory they take", _kernels, ReportOptions),
}

if __name__ == "__main__":
    sys.exit(main())
