"""Server processes that several tests share. A test that ends its server has one of its own."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.server import ServerProcess


@pytest.fixture(scope="session")
def server(tiny_dir: Path, tmp_path_factory) -> Iterator[ServerProcess]:
    with ServerProcess(tiny_dir, tmp_path_factory.mktemp("shared")) as started:
        yield started


@pytest.fixture(scope="session")
def openai_client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client
