"""The console over a real engine: a message, its streamed answer, a stop, the engine's page."""

import pytest

from tests.support.browser import Browser, find_browser
from tests.support.server import ServerProcess

pytestmark = [pytest.mark.browser, pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture(scope="session")
def browser_path() -> str:
    return find_browser()


def test_chat_and_engine(browser_path: str, server: ServerProcess) -> None:
    with Browser(browser_path) as browser:
        browser.open(server.url + "/")
        browser.wait("document.querySelector('#model').options.length")
        browser.evaluate("(() => { const box = document.querySelector('#set-max_tokens'); box.value = '12'; })()")
        browser.click("#draft")
        browser.type("Say something")
        browser.press("Enter", 13)
        browser.wait("document.querySelector('.answer[data-ended=length], .answer[data-ended=stop]')")
        browser.wait("/[0-9]+ tokens?$/m.test(document.querySelector('.figures').innerText)")
        browser.evaluate("(() => { document.querySelector('#set-max_tokens').value = '100000'; })()")
        browser.click("#draft")
        browser.type("Go on")
        browser.press("Enter", 13)
        browser.wait("document.querySelectorAll('.answer')[1].dataset.ended || "
                     "document.querySelectorAll('.answer')[1].innerText.includes('first token')")
        browser.press("Escape", 27)
        browser.wait("document.querySelectorAll('.answer')[1].dataset.ended")
        browser.click("nav a[data-page=engine]")
        browser.wait("[...document.querySelectorAll('.numbers dd')].some((one) => Number(one.textContent) >= 1)")
        assert browser.problems == []
