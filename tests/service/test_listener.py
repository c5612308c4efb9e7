import socket

import pytest

from tests.service.conftest import make_settings
from xllm_npu.service.listener import ListenError, check_tls, listen, remove_unix_socket, url_of


def test_port_zero_is_chosen_by_the_system():
    settings = make_settings(port=0).service
    with listen(settings) as sock:
        assert url_of(sock, settings) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_unknown_host():
    with pytest.raises(ListenError, match="--host"):
        listen(make_settings(host="no such host", port=0).service)


def test_a_stale_unix_socket_is_replaced_a_live_one_is_not(tmp_path):
    settings = make_settings(uds=str(tmp_path / "s")).service
    listen(settings).close()
    with listen(settings), pytest.raises(ListenError, match="already listens"):
        listen(settings)
    remove_unix_socket(settings)
    assert not (tmp_path / "s").exists()


def test_a_plain_file_is_never_removed(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    settings = make_settings(uds=str(path)).service
    with pytest.raises(ListenError, match="--uds"):
        listen(settings)
    remove_unix_socket(settings)
    assert path.read_text() == "x"


def test_unusable_tls_files(tmp_path):
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for file in (str(bad), str(tmp_path / "missing.pem")):
        with pytest.raises(ListenError, match="--ssl_certfile"):
            check_tls(make_settings(ssl_certfile=file, ssl_keyfile=file).service)


def test_ipv6():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    settings = make_settings(host="::1", port=0).service
    try:
        sock = listen(settings)
    except ListenError:
        pytest.skip("no IPv6 loopback here")
    with sock:
        assert url_of(sock, settings).startswith("http://[::1]:")
