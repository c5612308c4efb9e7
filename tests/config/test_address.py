"""host:port as people write it."""

import pytest

from xllm_npu.config.address import Address, parse_address
from xllm_npu.config.errors import SettingsError
from xllm_npu.config.load import load, load_settings
from xllm_npu.config.report import as_json, non_default_values, table


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("10.0.0.1:19888", "10.0.0.1", 19888), ("node-0:1", "node-0", 1), ("[fd00::1]:65535", "fd00::1", 65535),
     (" *:80 ", "*", 80)],
)
def test_addresses(text, host, port):
    address = parse_address(text)
    assert address == Address(host, port)
    assert str(address) == text.strip()


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:1x", "::1:80", "[::1]", "[nine]:1",
             "tcp://host:1", "a b:1", "a,b:1", "host:-1", "host:²"],
)
def test_no_addresses(text):
    with pytest.raises(ValueError, match="takes"):
        parse_address(text)


def test_a_wrong_address_is_refused_at_start():
    with pytest.raises(SettingsError, match="--master-node-addr"):
        load_settings(["--master-node-addr", "::1:80"], {})


def test_the_secret_shows_nowhere():
    loaded, _ = load(["--nnodes", "2", "--tp-size", "2"], {"XLLM_NPU_CLUSTER_SECRET": "sk-hidden"})
    settings = loaded.settings
    assert settings.distributed.cluster_secret == "sk-hidden"
    assert "cluster_secret" not in non_default_values([settings])
    for shown in (table(loaded), as_json(loaded), repr(loaded), settings.model_dump_json(), str(settings.model_dump())):
        assert "sk-hidden" not in shown
    assert "********" in table(loaded)
