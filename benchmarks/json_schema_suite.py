"""The official JSON-Schema-Test-Suite against structured output: what is refused, what is kept to, what is not.

Every schema of the suite (which comes with the sources of the package `jsonschema`) is refused with a reason, or is
accepted, and then the matcher has to reject every instance that the suite calls invalid, and what is written at random
under the matcher has to be valid in the eyes of `jsonschema`. Instances that the suite calls valid and the matcher
rejects are counted, and are no fault: the model only has to be able to write some of them.

    python benchmarks/json_schema_suite.py [--suite DIRECTORY] [--drafts draft2020-12,draft7] [--write FILE] [--json]

Without --suite the sources are fetched with pip. --write puts the table into a document, between two marks.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from xllm_npu.text import structured_output
from xllm_npu.text.grammar_matcher import GrammarError, MatcherFactory

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#", "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}  # fmt: skip
BEGIN, END = "<!-- json-schema-suite: begin -->", "<!-- json-schema-suite: end -->"
SAMPLES = 4  # written at random for each schema
LONGEST = 600  # bytes; what has not ended by then tells nothing
EOS = 256


@dataclass(slots=True)
class Case:
    """One schema of the suite, and its instances."""

    draft: str
    keyword: str  # the file's name
    description: str
    schema: Any
    tests: list[dict[str, Any]]


@dataclass(slots=True)
class Verdict:
    refused: str = ""  # why
    lax: list[str] = field(default_factory=list)  # invalid instances that the matcher accepts, or that were written
    narrow: int = 0  # valid instances that it rejects
    checked: int = 0  # invalid instances, and outputs written


class Judge:
    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<eos>"])
        self._backend = backend
        self._factory = MatcherFactory(backend.to_str(), EOS + 1, [EOS])
        self._id = {bytes([b]): backend.token_to_id(c) for b, c in _byte_symbols().items()}
        self._bytes = {i: b for b, i in self._id.items()}
        self._closing = {self._id[c] for c in (b'"', b"}", b"]")} | {EOS}

    def judge(self, case: Case) -> Verdict:
        verdict = Verdict()
        schema = case.schema
        if isinstance(schema, dict):
            schema = {"$schema": DRAFTS[case.draft], **schema}
        try:
            grammar = structured_output.json_schema(schema)
            self._factory.check(grammar)
        except (GrammarError, ValueError) as error:
            verdict.refused = str(error)
            return verdict
        for test in case.tests:
            accepted = self.accepts(grammar, json.dumps(test["data"], ensure_ascii=False))
            if test["valid"]:
                verdict.narrow += not accepted
                continue
            verdict.checked += 1
            if accepted:
                verdict.lax.append(f"accepts {json.dumps(test['data'])[:80]} ({test['description']})")
        self._write_and_validate(case, schema, grammar, verdict)
        return verdict

    def _write_and_validate(self, case: Case, schema: Any, grammar: str, verdict: Verdict) -> None:
        from jsonschema import validators
        from jsonschema.exceptions import ValidationError

        kind = validators.validator_for({"$schema": DRAFTS[case.draft]})
        formats = kind.FORMAT_CHECKER if case.keyword.startswith("optional/format/") else None
        validator = kind(schema, format_checker=formats)
        for seed in range(SAMPLES):
            text = self.write(grammar, np.random.default_rng(seed))
            if text is None:
                continue
            try:
                validator.validate(json.loads(text))
            except re.error:
                return  # a pattern of JavaScript's that Python does not know
            except (ValidationError, ValueError) as error:
                verdict.lax.append(f"wrote {text[:80]} ({str(error).splitlines()[0][:100]})")
            verdict.checked += 1

    def accepts(self, grammar: str, text: str) -> bool:
        matcher = self._factory.matcher(grammar)
        tokens = [self._id[bytes([b])] for b in text.encode("utf-8", "surrogatepass")]
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    def write(self, grammar: str, rng: np.random.Generator) -> str | None:
        """Text that the matcher allows, at random; the longer it lasts the likelier what ends things."""
        matcher = self._factory.matcher(grammar)
        out = b""
        while len(out) < LONGEST:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            choices = np.flatnonzero(bits).tolist()
            ends = [t for t in choices if t in self._closing]
            token = int(rng.choice(ends if ends and rng.uniform() < (len(out) + 5) / 80 else choices))
            if not matcher.consume_token(token):
                return f"(refused its own byte after {out.decode(errors='replace')})"
            if token == EOS:
                return out.decode()
            out += self._bytes[token]
        return None


def _byte_symbols() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    found = {b: chr(b) for b in printable}
    found.update({b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in found)})
    return found


def cases(suite: Path, drafts: Iterable[str]) -> Iterator[Case]:
    for draft in drafts:
        folder = suite / "tests" / draft
        for file in sorted(folder.rglob("*.json")):
            keyword = str(file.relative_to(folder).with_suffix(""))
            for group in json.loads(file.read_text()):
                yield Case(draft, keyword, group["description"], group["schema"], group["tests"])


def fetch(directory: Path) -> Path:
    """The suite, out of the sources of `jsonschema`."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-binary", "jsonschema", "--no-deps",
                    "--dest", str(directory), "jsonschema"], check=True)
    [archive] = directory.glob("jsonschema-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="data")
    [suite] = directory.glob("jsonschema-*/json")
    return suite


@dataclass(slots=True)
class Row:
    """What became of the schemas of one keyword."""

    schemas: int = 0
    accepted: int = 0
    checked: int = 0
    narrow: int = 0
    lax: list[tuple[Case, str]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, case: Case, verdict: Verdict) -> None:
        self.schemas += 1
        if verdict.refused:
            self.reasons[_reason(verdict.refused)] += 1
            return
        self.accepted += 1
        self.checked += verdict.checked
        self.narrow += verdict.narrow
        self.lax += [(case, text) for text in verdict.lax]


def _reason(message: str) -> str:
    """Without what is this schema's own."""
    message = re.sub(r"^.*?Unimplemented keys: ", "unimplemented: ", message)
    return re.sub(r"(json-schema:|https?:|urn:|file:)\S+", "...", message)[:90]


def judge_all(suite: Path, drafts: Iterable[str]) -> dict[str, Row]:
    judge, rows = Judge(), defaultdict(Row)
    for case in cases(suite, drafts):
        rows[case.keyword].add(case, judge.judge(case))
    return dict(sorted(rows.items()))


def table(rows: dict[str, Row]) -> str:
    """Files of drafts that are alike are one row; "tried" are invalid instances, and outputs written at random."""
    lines = ["| file of the suite | schemas | accepted | tried | let through | refused because |",
             "|---|--:|--:|--:|--:|---|"]
    for keyword, row in rows.items():
        reasons = "; ".join(f"{text.replace('|', chr(92) + '|')} ({n})" for text, n in row.reasons.most_common(3))
        lines.append(f"| {keyword} | {row.schemas} | {row.accepted} | {row.checked} | {len(row.lax)} | {reasons} |")
    total = [sum(v) for v in zip(*((r.schemas, r.accepted, r.checked, len(r.lax)) for r in rows.values()))]
    lines.append("| **all** | " + " | ".join(map(str, total)) + " | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", type=Path, help="a checkout of JSON-Schema-Test-Suite")
    parser.add_argument("--drafts", default=",".join(DRAFTS))
    parser.add_argument("--write", type=Path, help="a document with the two marks")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = judge_all(args.suite or fetch(Path(directory)), args.drafts.split(","))
    print(table(rows))
    for row in rows.values():
        for case, text in row.lax:
            print(f"{case.draft} {case.keyword}: {case.description}: {text}", file=sys.stderr)
    if args.write is not None:
        text = args.write.read_text()
        before, rest = text.split(BEGIN)
        args.write.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.split(END)[1]}")
    if args.json:
        print(json.dumps({k: {"schemas": r.schemas, "accepted": r.accepted, "checked": r.checked, "lax": len(r.lax)}
                          for k, r in rows.items()}))


if __name__ == "__main__":
    main()
