"""A headless Chromium, driven over its debugging pipe: the few commands of the DevTools protocol that tests need.

The pipe is two file descriptors with JSON messages that end with a zero byte; no WebSocket, no further package.
Protocol: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DEADLINE = 30.0
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--mute-audio",
         "--hide-scrollbars", "--remote-debugging-pipe", "about:blank")
REQUIRED = "TEST_BROWSER_REQUIRED"  # set by `make test-browser`: without a browser that fails


def find_browser() -> str:
    """Its path; the test is skipped where there is none."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    why = f"no browser on this machine (sought {', '.join(NAMES)})"
    if os.environ.get(REQUIRED):
        pytest.fail(why)
    pytest.skip(why)


class Browser:
    """One page of one browser with a profile of its own. Not for two threads at once."""

    def __init__(self, path: str, width: int = 1280, height: int = 800) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads from descriptor 3 and writes to 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", path, *FLAGS,
             f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}"],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True)
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session = ""
        self.problems: list[str] = []  # errors that the page or its policy reported
        target = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.size(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._out)  # which ends it
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + DEADLINE
        while True:
            answer = self._receive(until, method)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _receive(self, until: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser does not answer {method}"
            data = os.read(self._in, 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            entry = event["params"]["entry"]
            self.problems.append(f"{entry['text']} {entry.get('url', '')}")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, of a promise what it comes to."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True,
                           userGesture=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def wait(self, condition: str, what: str = "") -> Any:
        """The first true value of `condition`, looked at every frame or so by the page itself."""
        until = time.monotonic() + DEADLINE
        question = ("new Promise((done) => { let left = 40; const look = () => { const value = (() => "
                    f"{{ try {{ return ({condition}); }} catch {{ return null; }} }})(); "
                    "if (value || !(left -= 1)) done(value instanceof Node || value || null); "
                    "else setTimeout(look, 25); }; look(); })")
        while not (value := self._evaluate_anyway(question)):
            assert time.monotonic() < until, f"waited for {what or condition}; problems: {self.problems}"
        return value

    def _evaluate_anyway(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        return answer["result"].get("value")  # a page that is being left answers nothing

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, shift: bool = False) -> None:
        text = {"Enter": "\r", "Tab": ""}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                      modifiers=8 if shift else 0, **({"text": text} if text and kind == "keyDown" else {}))

    def click(self, selector: str) -> None:
        """As a user does: at its middle, on whatever lies on top there."""
        box = self.evaluate(f"(() => {{ const node = document.querySelector({json.dumps(selector)}); "
                            "node.scrollIntoView({block: 'nearest'}); const box = node.getBoundingClientRect(); "
                            "return [box.x + box.width / 2, box.y + box.height / 2, box.width]; })()")
        assert box[2] > 0, f"{selector} is not shown"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
