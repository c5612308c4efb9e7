"""docs/api.md is what the code says now."""

from tests.docs.markdown import ROOT
from xllm_npu.service.api_table import PURPOSES, document
from xllm_npu.service.protocol import GUIDED, IGNORED, ChatBody
from xllm_npu.service.unsupported import UNSUPPORTED


def test_the_document_is_current():
    assert (ROOT / "docs" / "api.md").read_text("utf-8") == document(), "run `make api-docs`"


def test_every_route_says_what_it_is_for():
    rows = [row.split(" | ") for row in document().splitlines() if row.startswith(("| GET", "| POST"))]
    assert len(rows) > 20
    assert [row[1] for row in rows if not row[2].strip(" |")] == []
    assert set(PURPOSES) <= {row[1] for row in rows}


def test_every_field_of_chat_has_a_verdict():
    text = document().partition("## Fields of `/v1/chat/completions`")[2].partition("\n## ")[0]
    rows = dict(row.strip("| ").split(" | ")[::2] for row in text.splitlines() if row.startswith("| `"))
    assert rows["`messages`"] == "required"
    for name in ChatBody.model_fields:
        assert rows[f"`{name}`"] in ("supported", "required")
    for name in (IGNORED | GUIDED) - ChatBody.model_fields.keys():
        assert rows[f"`{name}`"] == "ignored"
    for name in UNSUPPORTED.keys() - ChatBody.model_fields.keys():
        assert rows[f"`{name}`"].startswith("refused")
