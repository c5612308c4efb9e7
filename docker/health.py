#!/usr/bin/env python3
"""Whether the server in this container answers /health: exit code 0 if it does, else 1 with the reason.

It finds the server as the server was told where to listen: by environment variables (XLLM_NPU_PORT and its like, also
XLLM_NPU_CONFIG_JSON_FILE). Give those rather than --port, --host or --uds, or this looks in the wrong place. A server
that asks for clients' certificates does not let this in: docker run --no-healthcheck.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import sys

from xllm_npu.config.errors import SettingsError
from xllm_npu.config.load import load
from xllm_npu.config.service import ServiceSettings

SECONDS = 5.0
HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(SECONDS)
        self.sock.connect(self._path)


def connection(service: ServiceSettings) -> http.client.HTTPConnection:
    if service.uds:
        return UnixConnection(str(service.uds))
    host = HERE.get(service.host, service.host)
    if service.ssl_certfile:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # its name need not be this address
        return http.client.HTTPSConnection(host, service.port, timeout=SECONDS, context=context)
    return http.client.HTTPConnection(host, service.port, timeout=SECONDS)


def main() -> int:
    try:
        asked = connection(load([], dict(os.environ))[0].settings.service)
        asked.request("GET", "/health")
        reply = asked.getresponse()
    except (OSError, http.client.HTTPException, SettingsError) as error:
        print(f"no answer: {error}")
        return 1
    print(f"/health: {reply.status}")
    return 0 if reply.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
