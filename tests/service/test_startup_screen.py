import io

import msgspec

from tests.service.fake_master import INFO
from xllm_npu.service.startup_screen import StartupScreen, amount, byte_text
from xllm_npu.state.messages import EngineProgress, PoolingInfo, WeightLoad


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_bars_and_a_table(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with StartupScreen(stream) as screen:
        screen.on_progress(EngineProgress("Loading weights", 1, 2, "shards"))
        screen.on_progress(EngineProgress("Loading weights", 2, 2, "shards"))
        screen.on_progress(EngineProgress("Warming up", 0, 0))
    screen.show_ready([(INFO, ("tiny",))], "http://127.0.0.1:8000")
    text = stream.getvalue()
    assert "2 of 2 shards" in text
    assert "Warming up" in text
    assert "http://127.0.0.1:8000" in text
    assert "1,024 tokens" in text


def test_several_models_are_told_apart(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    models = [(INFO, ("one", "eins")), (msgspec.structs.replace(INFO, max_model_len=77), ("two",))]
    lines, stream = io.StringIO(), Terminal()
    for screen in (StartupScreen(lines), StartupScreen(stream)):
        with screen:
            screen.on_progress(EngineProgress("Loading weights", 1, 2, "shards"), "one")
            screen.on_progress(EngineProgress("Loading weights", 1, 2, "shards"), "two")
        screen.show_ready(models, "http://127.0.0.1:8000", "http://127.0.0.1:8001")
    text = lines.getvalue().splitlines()
    assert text[:2] == ["one: Loading weights 1 of 2 shards", "two: Loading weights 1 of 2 shards"]
    assert [line.split(" (")[0] for line in text if line.startswith("Model:")] == ["Model: one, eins", "Model: two"]
    assert [line for line in text if line.startswith("Context:")] == ["Context: 512 tokens", "Context: 77 tokens"]
    assert text[-2:] == ["Admin routes at: http://127.0.0.1:8001", "Serving at: http://127.0.0.1:8000"]
    assert stream.getvalue().count("├") == 2


def test_lines_are_few():
    stream = io.StringIO()
    with StartupScreen(stream) as screen:
        for done in range(1001):
            screen.on_progress(EngineProgress("Graphs", done, 1000))
    assert stream.getvalue().splitlines() == [
        "Graphs 0 of 1,000", "Graphs 250 of 1,000", "Graphs 500 of 1,000", "Graphs 750 of 1,000",
        "Graphs 1,000 of 1,000"]


def test_amounts():
    assert amount(EngineProgress("x", 3 << 30, 4 << 30, "bytes")) == "3.0 GiB of 4.0 GiB"
    assert amount(EngineProgress("x", 3, 0, "files")) == "3 files"
    assert amount(EngineProgress("x", 0, 0)) == ""
    assert byte_text(1 << 60) == "1048576.0 TiB"


def test_what_a_model_gives_that_writes_no_text():
    embeds = PoolingInfo(task="embed", width=1024, all_positions=True, normalize=True)
    for pooling, said in (
        (embeds, "Gives: embeddings of 1,024 values and length 1"), (
            msgspec.structs.replace(embeds, task="classify", labels=["a"]), "Gives: scores"),
        (msgspec.structs.replace(embeds, task="classify", labels=["a", "b"]), "Gives: one of 2 classes"),
    ):
        stream = io.StringIO()
        info = msgspec.structs.replace(INFO, pooling=pooling, kv_cache_bytes=0)
        StartupScreen(stream).show_ready([(info, ("tiny",))], "http://127.0.0.1:8000")
        lines = stream.getvalue().splitlines()
        assert said in lines
        assert "KV cache: none" in lines


def test_how_the_network_runs_and_what_loading_took():
    stream = io.StringIO()
    loads = [WeightLoad(rank, 3 << 30, 1.25, 5 << 29) for rank in range(2)]
    info = msgspec.structs.replace(INFO, implementation="transformers", load_format="dummy", weight_loads=loads)
    StartupScreen(stream).show_ready([(info, ("tiny",))], "http://127.0.0.1:8000")
    lines = stream.getvalue().splitlines()
    assert "Network: transformers' modelling code with the paged attention of this package" in lines
    assert [line for line in lines if line.startswith("Weights of rank")] == [
        f"Weights of rank {rank}: 3.0 GiB in 1.2 s, host memory at most 2.5 GiB above the start" for rank in range(2)]
    assert "dummy weights" in stream.getvalue()
    stream.truncate(0)
    StartupScreen(stream).show_ready([(INFO, ("tiny",))], "http://127.0.0.1:8000")
    assert "Network: native" in stream.getvalue()
