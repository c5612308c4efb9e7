"""What every room's tests may use. Heavy imports stay inside the fixtures that need them."""

from pathlib import Path

import hypothesis
import pytest

# The same code gets the same verdict, whoever runs it; `make test-full` looks at other cases each time.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """A random two-layer Llama with a byte tokenizer; positions for 32768 tokens."""
    from tests.support.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_length=32768)
