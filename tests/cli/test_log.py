"""Log lines: their form, their level, and that one record is one record."""

import io
import json
import logging
import re

import pytest

from xllm_npu.log import REQUEST_ID, LineFormatter, setup_logging


@pytest.fixture(autouse=True)
def restored():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("xllm_npu", "xllm_models", "xllm_platform", "xllm_kernels_npu"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def logged(level, *records, process=""):
    stream = io.StringIO()
    setup_logging(level, process=process, stream=stream)
    for name, severity, text in records:
        logging.getLogger(name).log(severity, text)
    return stream.getvalue()


def test_form():
    line = logged("info", ("xllm_npu.master.engine", logging.INFO, "ready"), process="engine 0")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} I \[engine 0\] engine: ready\n", line)


def test_a_record_cannot_forge_another():
    text = logged("info", ("xllm_npu", logging.INFO, "a\n2026-01-01 00:00:00.000 E xllm_npu: b"))
    assert text.count("\n") == 2
    assert "\n    2026" in text


def test_levels():
    records = [("xllm_npu", logging.INFO, "ours"), ("library", logging.INFO, "theirs"),
               ("library", logging.WARNING, "their warning"), ("xllm_npu", logging.DEBUG, "detail")]  # fmt: skip
    text = logged("info", *records)
    assert "ours" in text
    assert "their warning" in text
    assert "theirs" not in text.replace("their warning", "")
    assert "detail" not in text
    assert logged("error", *records) == ""
    assert "detail" in logged("debug", *records)


def test_setting_up_twice_replaces():
    first = io.StringIO()
    setup_logging("info", stream=first)
    assert logged("info", ("xllm_npu", logging.INFO, "once")).count("once") == 1
    assert first.getvalue() == ""
    assert sum(isinstance(h.formatter, LineFormatter) for h in logging.getLogger().handlers) == 1


def test_exceptions_are_indented():
    stream = io.StringIO()
    setup_logging("info", stream=stream)
    try:
        raise ValueError("x")
    except ValueError:
        logging.getLogger("xllm_npu").exception("failed")
    assert "failed\n    Traceback" in stream.getvalue()


def test_json_lines():
    stream = io.StringIO()
    setup_logging("info", process="engine 0", stream=stream, form="json")
    token = REQUEST_ID.set("abc")
    try:
        logging.getLogger("xllm_npu.service").info("a\nb \u2028 %s", "c")
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("xllm_npu").exception("failed")
    finally:
        REQUEST_ID.reset(token)
    logging.getLogger("xllm_npu").info("later")
    first, second, third = [json.loads(line) for line in stream.getvalue().splitlines() if line.startswith("{")]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    first.pop("pid")
    assert first == {"level": "info", "logger": "xllm_npu.service", "message": "a\nb \u2028 c", "process": "engine 0",
                     "request_id": "abc"}
    assert "ValueError: why" in second["exception"]
    assert "request_id" not in third


def test_json_replaces_text_and_back():
    stream = io.StringIO()
    setup_logging("info", stream=stream, form="json")
    assert logged("info", ("xllm_npu", logging.INFO, "once")).count("once") == 1
    assert stream.getvalue() == ""
