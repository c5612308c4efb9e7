"""How one request wants its tokens chosen and when it wants them to stop.

The same object is what `LLM.generate` takes and what travels to the engine process (msgspec encodes
dataclasses). `check()` is the single place where ranges are enforced; it raises `InvalidParameter`, which
names the field as the OpenAI API spells it. Knows no tokenizer: everything here is token ids, but for the
fields marked (text), which the text side consumes before the request reaches the engine.
"""

import math
from dataclasses import dataclass, field

from xllm_npu.state.repetition import MAX_PATTERN_SIZE, MAX_REPETITIONS, RepetitionDetection

MAX_SEQUENCES = 128  # n and best_of
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 65536
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 10
MAX_GRAMMAR_CHARS = 1 << 20
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class InvalidParameter(ValueError):
    """A request field has a value we cannot honour. `param` is the field's name in the API."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.message = message


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping settings of one request; field names follow the OpenAI API and its extensions."""

    n: int = 1
    best_of: int | None = None  # sequences generated; the n best by mean logprob are returned
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None  # None: up to the model's context
    min_tokens: int = 0
    stop: tuple[str, ...] = ()  # (text)
    include_stop_str_in_output: bool = False  # (text)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; 0: the chosen token only; k: and the k most likely
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()  # (text)
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # what bad_words became
    skip_special_tokens: bool = True  # (text)
    spaces_between_special_tokens: bool = True  # (text)
    shown_special_tokens: tuple[str, ...] = ()  # (text) in spite of skip_special_tokens: markers that someone parses
    detokenize: bool = True  # (text)
    # Search instead of sampling: num_sequences beams, of which the n with the highest score are returned.
    use_beam_search: bool = False
    length_penalty: float = 1.0  # of a beam's score, cumulative logprob / length ** length_penalty
    # What the output has to match: an llguidance grammar in its JSON form, as text.structured_output makes them.
    grammar: str | None = None
    repetition_detection: RepetitionDetection | None = None  # (text)
    stream_interval: int = 1  # (text) tokens an output brings at least, but for the first and the last

    def __post_init__(self) -> None:
        """Lists are taken where tuples are kept, and one stop string or bad word where several are."""
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, tuple):
                object.__setattr__(self, name, tuple(value))

    @property
    def num_sequences(self) -> int:
        """Sequences the engine generates for this request."""
        return self.best_of or self.n

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    def check(self, vocab_size: int | None = None) -> None:
        """Raise `InvalidParameter` for the first field out of range; `vocab_size` bounds token ids."""
        _check_counts(self)
        _check_scalars(self)
        _check_tokens(self, vocab_size)
        _check_beams(self, vocab_size)


def _require(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise InvalidParameter(param, message)


def _in(value: float, low: float, high: float, param: str) -> None:
    message = f"{param} must be in [{low:g}, {high:g}], got {value:g}."
    _require(math.isfinite(value) and low <= value <= high, param, message)


def _check_counts(p: SamplingParams) -> None:
    _in(p.n, 1, MAX_SEQUENCES, "n")
    if p.best_of is not None:
        _in(p.best_of, 1, MAX_SEQUENCES, "best_of")
        _require(p.best_of >= p.n, "best_of", f"best_of must be at least n, got best_of={p.best_of} and n={p.n}.")
    if p.max_tokens is not None:
        _require(p.max_tokens >= 1, "max_tokens", f"max_tokens must be at least 1, got {p.max_tokens}.")
    _require(p.min_tokens >= 0, "min_tokens", f"min_tokens must be at least 0, got {p.min_tokens}.")
    if p.max_tokens is not None:
        _require(p.min_tokens <= p.max_tokens, "min_tokens",
                 f"min_tokens must be at most max_tokens={p.max_tokens}, got {p.min_tokens}.")
    _require(len(p.stop) <= MAX_STOP_STRINGS, "stop",
             f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(p.stop)}.")
    _require(all(p.stop), "stop", "stop must not contain an empty string.")
    _require(len(p.stop_token_ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids",
             f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(p.stop_token_ids)}.")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        if value is not None:
            _in(value, 0, MAX_LOGPROBS, name)
    _require(p.stream_interval >= 1, "stream_interval", f"stream_interval must be at least 1, got {p.stream_interval}.")
    size = len(p.grammar or "")
    _require(size <= MAX_GRAMMAR_CHARS, "grammar",
             f"grammar takes at most {MAX_GRAMMAR_CHARS} characters, got {size}.")
    if p.repetition_detection is not None:
        _check_repetition(p.repetition_detection)


def _check_repetition(r: RepetitionDetection) -> None:
    name, low, high = "repetition_detection", r.min_pattern_size, r.max_pattern_size
    _require(0 <= low <= high <= MAX_PATTERN_SIZE, name,
             f"{name}: 0 <= min_pattern_size <= max_pattern_size <= {MAX_PATTERN_SIZE} must hold, got min_pattern_size="
             f"{low} and max_pattern_size={high}.")
    _require(r.off or 2 <= r.min_count <= MAX_REPETITIONS, name,
             f"{name}: min_count must be in [2, {MAX_REPETITIONS}], got {r.min_count}.")


def _check_scalars(p: SamplingParams) -> None:
    _in(p.temperature, 0, 2, "temperature")
    _require(math.isfinite(p.top_p) and 0 < p.top_p <= 1, "top_p", f"top_p must be in (0, 1], got {p.top_p:g}.")
    _require(p.top_k >= -1, "top_k", f"top_k must be at least 1, or 0 or -1 for off, got {p.top_k}.")
    _in(p.min_p, 0, 1, "min_p")
    _in(p.presence_penalty, -2, 2, "presence_penalty")
    _in(p.frequency_penalty, -2, 2, "frequency_penalty")
    _require(math.isfinite(p.repetition_penalty) and 0 < p.repetition_penalty <= 100, "repetition_penalty",
             f"repetition_penalty must be in (0, 100], got {p.repetition_penalty:g}.")
    if p.seed is not None:
        _require(INT64_MIN <= p.seed <= INT64_MAX, "seed", f"seed must fit in 64 bits, got {p.seed}.")


def _check_tokens(p: SamplingParams, vocab_size: int | None) -> None:
    def ids(values: object, param: str) -> None:
        for t in values:  # type: ignore[attr-defined]
            _require(t >= 0 and (vocab_size is None or t < vocab_size), param,
                     f"{param} has token id {t}, which is not in the vocabulary"
                     + (f" (0 to {vocab_size - 1})." if vocab_size else "."))

    _require(len(p.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"logit_bias takes at most {MAX_LOGIT_BIAS} entries.")
    for value in p.logit_bias.values():
        _in(value, -100, 100, "logit_bias")
    if p.allowed_token_ids is not None:
        _require(0 < len(p.allowed_token_ids) <= MAX_ALLOWED_TOKEN_IDS, "allowed_token_ids",
                 f"allowed_token_ids must have 1 to {MAX_ALLOWED_TOKEN_IDS} ids.")
        ids(p.allowed_token_ids, "allowed_token_ids")
    _require(len(p.logprob_token_ids) <= MAX_LOGPROB_TOKEN_IDS, "logprob_token_ids",
             f"logprob_token_ids takes at most {MAX_LOGPROB_TOKEN_IDS} ids.")
    _require(len(p.bad_words) <= MAX_BAD_WORDS and len(p.bad_words_token_ids) <= 2 * MAX_BAD_WORDS, "bad_words",
             f"bad_words takes at most {MAX_BAD_WORDS} words.")
    _require(all(p.bad_words), "bad_words", "bad_words must not contain an empty string.")
    ids(p.logit_bias, "logit_bias")
    ids(p.stop_token_ids, "stop_token_ids")
    ids(p.logprob_token_ids, "logprob_token_ids")


# What changes a token's probability or needs text while the search goes on, and the values that ask for nothing.
NOT_WITH_BEAMS = {
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {},
    "allowed_token_ids": None, "bad_words": (), "bad_words_token_ids": (), "stop": (), "repetition_detection": None,
    "grammar": None,
}


def _check_beams(p: SamplingParams, vocab_size: int | None) -> None:
    if not p.use_beam_search:
        _require(p.length_penalty == 1, "length_penalty", "length_penalty needs use_beam_search to be true.")
        return
    _in(p.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY, "length_penalty")
    widest = MAX_BEAM_WIDTH if vocab_size is None else min(MAX_BEAM_WIDTH, vocab_size // 2)
    name = "n" if p.best_of is None else "best_of"
    _require(p.num_sequences <= widest, name,
             f"{name} is the number of beams with use_beam_search: at most {widest}, got {p.num_sequences}.")
    for name, neutral in NOT_WITH_BEAMS.items():
        _require(getattr(p, name) == neutral, name, f"{name} is not available with use_beam_search.")
