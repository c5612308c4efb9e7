"""The console in a browser, as a user has it: typing, streaming, stopping, the live page; skipped without Chromium."""

import asyncio
import json
from collections.abc import Callable, Iterator

import pytest

from tests.service.conftest import live_server
from tests.service.fake_master import FakeMaster, output, says
from tests.support.browser import Browser, find_browser
from xllm_npu.state.output import SequenceDelta
from xllm_npu.text.output_format import ModelHints, output_format

pytestmark = pytest.mark.browser

ANSWERED = "document.querySelectorAll('.turn.answer[data-ended]').length"
HOSTILE = ('<img src=x onerror="window.hit=1"><script>window.hit=1</script> [a](javascript:window.hit=1) '
           '![p](https://example.com/p.png) `<b>` <https://example.com/> [b](//example.com) **x <i>y</i>**')


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(find_browser()) as started:
        yield started


async def visit(master: FakeMaster, browser: Browser, steps: Callable[[str], None], **service: object) -> None:
    """`steps` run on a thread, as the server needs this one."""
    browser.problems.clear()
    async with live_server(master, **service) as server:
        await asyncio.to_thread(steps, server.url)
        await asyncio.to_thread(browser.open, "about:blank")


def say(browser: Browser, text: str) -> None:
    browser.click("#draft")
    browser.type(text)
    browser.press("Enter", 13)


async def test_a_message_and_its_streamed_answer(master, browser):
    go = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def script(request):
        yield output(request, SequenceDelta(0, "One **two", [1]), generated=3)
        await go.wait()
        yield output(request, SequenceDelta(0, "** three", [1], None, "stop"), generated=5, finished=True)

    master.script = script

    def steps(url: str) -> None:
        browser.open(url + "/")
        browser.wait("document.querySelector('#opening-model').textContent === 'tiny'")
        browser.evaluate("document.querySelector('#set-temperature').value = '0.5'")
        browser.evaluate("document.querySelector('#system').value = 'Be brief.'")
        say(browser, "Hi <b>there</b>")
        browser.wait("document.querySelector('.answer .said').textContent === 'One **two'")
        assert not browser.evaluate("document.querySelector('#stop').hidden")
        browser.evaluate("new Promise((done) => setTimeout(done, 60))")  # a shorter answer is shown without a rate
        loop.call_soon_threadsafe(go.set)
        browser.wait(ANSWERED)
        browser.wait("document.querySelector('.answer strong')?.textContent === 'two'")
        assert browser.evaluate("document.querySelector('.answer .said').textContent") == "One two three"
        assert browser.evaluate("document.querySelector('.you .said').textContent") == "Hi <b>there</b>"
        figures = browser.evaluate("document.querySelector('.figures').innerText")
        assert "ms to first token" in figures
        assert "tokens/s" in figures
        assert "5 tokens" in figures
        say(browser, "And then?")
        browser.wait(ANSWERED + " === 2")

    await visit(master, browser, steps)
    assert browser.problems == []
    first, second = master.requests
    assert first.params.temperature == 0.5
    assert bytes(first.prompt_token_ids) == b"<system>Be brief.<user>Hi <b>there</b>"
    assert bytes(second.prompt_token_ids).endswith(b"<assistant>One **two** three<user>And then?")


async def test_an_answer_is_stopped(master, browser):
    async def script(request):
        while True:
            yield output(request, SequenceDelta(0, "x ", [1]), generated=1)
            await asyncio.sleep(0.01)

    master.script = script

    def steps(url: str) -> None:
        browser.open(url + "/")
        for number, stop in enumerate((lambda: browser.click("#stop"), lambda: browser.press("Escape", 27)), 1):
            say(browser, "Go on for ever")
            browser.wait(f"document.querySelectorAll('.answer .said')[{number - 1}]?.textContent.length > 6")
            stop()
            browser.wait(f"{ANSWERED} === {number}")
        assert browser.evaluate("[...document.querySelectorAll('.answer')].map((one) => one.dataset.ended).join()"
                                ) == "stopped,stopped"

    await visit(master, browser, steps)
    assert len(master.aborted) == 2


async def test_what_a_model_says_is_text(master, browser):
    master.script = says(HOSTILE)

    def steps(url: str) -> None:
        browser.open(url + "/")
        say(browser, "Do harm")
        browser.wait(ANSWERED)
        browser.wait("document.querySelector('.answer code')")
        assert browser.evaluate("document.querySelectorAll('.answer .said :is(img, script, i, iframe)').length") == 0
        links = browser.evaluate("[...document.querySelectorAll('.answer .said a')].map((one) => one.href)")
        assert set(links) <= {"https://example.com/p.png", "https://example.com/"}
        assert browser.evaluate("window.hit === undefined")
        assert "<script>" in browser.evaluate("document.querySelector('.answer .said').textContent")

    await visit(master, browser, steps)
    assert browser.problems == []


MARKDOWN = {
    "a\n\nb": ["<p>a</p>", "<p>b</p>"],
    "# T\n- a\n- b\n  - c\n": ["<h3>T</h3>", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>"],
    "- a\n\n3. x\n4. y": ["<ul><li>a</li></ul>", '<ol start="3"><li>x</li><li>y</li></ol>'],
    "> q\n> r": ["<blockquote><p>q\nr</p></blockquote>"],
    "`a*b` *c* __d__ ~~e~~ 2*3*4 snake_case_name": [
        "<p><code>a*b</code> <em>c</em> <strong>d</strong> <del>e</del> 2<em>3</em>4 snake_case_name</p>"],
    "|a|b|\n|-|-:|\n|1|2\\|3|": [
        '<div class="table"><table><thead><tr><th>a</th><th class="right">b</th></tr></thead><tbody><tr><td>1</td>'
        '<td class="right">2|3</td></tr></tbody></table></div>'],
    "---": ["<hr>"],
    "\\*no\\* [l](https://e.com)": [
        '<p>*no* <a href="https://e.com" target="_blank" rel="noopener noreferrer nofollow">l</a></p>'],
    "**open": ["<p>**open</p>"],
    "[x](javascript:a) [y](data:b) [z](/c)": ["<p>x y z</p>"],
    "<b>&amp;": ["<p>&lt;b&gt;&amp;amp;</p>"],
}  # fmt: skip
DRAW = """(async () => {
  const { MarkdownView } = await import('./console/markdown.js');
  const draw = (text, pieces) => {
    const node = document.createElement('div');
    const view = new MarkdownView(node);
    for (const end of pieces) view.draw(text.slice(0, end));
    view.draw(text);
    return [...node.children].map((one) => one.outerHTML);
  };
  const text = %s;
  return [draw(text, []), draw(text, [...text].map((_, i) => i))];
})()"""


async def test_markdown(master, browser):
    """Drawn at once, and drawn letter by letter: the same."""
    fence = "t\n```py\nx = '<b>'\n``\n```\nafter"
    evil = ["[" * 20000, "*" * 20000, "a **" * 9000, "`" * 9001, "> " * 5000, "- " * 5000,
            "|" * 5000 + "\n" + "|-" * 5000,
            "[a](" * 5000, "http://" * 3000, "_a " * 9000, "\\" * 9000, "```\n" * 4000]  # fmt: skip

    def steps(url: str) -> None:
        browser.open(url + "/")
        for text, expected in MARKDOWN.items():
            whole, grown = browser.evaluate(DRAW % json.dumps(text))
            assert whole == expected, text
            assert grown == expected, text
        whole, grown = browser.evaluate(DRAW % json.dumps(fence))
        assert whole == grown
        assert "x = '&lt;b&gt;'\n``" in whole[1]
        milliseconds = browser.evaluate(
            "(async () => { const { MarkdownView } = await import('./console/markdown.js'); const took = []; "
            f"for (const text of {json.dumps(evil)}) {{ const began = performance.now(); "
            "new MarkdownView(document.createElement('div')).draw(text); took.push(performance.now() - began); } "
            "return took; })()")
        assert max(milliseconds) < 5000, milliseconds  # a quadratic scan of these takes minutes

    await visit(master, browser, steps)


async def test_reasoning_is_folded(master, browser):
    """Under either name, and under both at once."""

    def steps(url: str) -> None:
        browser.open(url + "/")
        shown = browser.evaluate("""(async () => {
          const { AnswerTurn } = await import('./console/transcript.js');
          const turn = new AnswerTurn('m', () => 0);
          document.querySelector('#turns').append(turn.node);
          turn.take({ choices: [{ delta: { reasoning: 'Let me ' } }] });
          turn.take({ choices: [{ delta: { reasoning_content: 'see.' } }] });
          turn.take({ choices: [{ delta: { reasoning: '!', reasoning_content: '!' } }] });
          turn.take({ choices: [{ delta: { content: 'Yes' }, finish_reason: 'length' }] });
          turn.end('', '');
          await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
          return [turn.details.open, turn.thought.textContent, turn.body.textContent, turn.summary.textContent,
                  turn.figures.innerText];
        })()""")
        assert shown[:3] == [False, "Let me see.!", "Yes"]
        assert shown[3].startswith("Reasoned for")
        assert "cut at the limit" in shown[4]

    await visit(master, browser, steps)


async def test_reasoning_of_a_model(master, browser):
    """From the model's text through the parser and the stream."""
    master.output_format = output_format("hermes", "qwen3", ModelHints())
    master.script = says("<think>\nHm", ", hm.\n</thi", "nk>\n\nYes", ".")

    def steps(url: str) -> None:
        browser.open(url + "/")
        say(browser, "Is it?")
        browser.wait(ANSWERED)
        browser.wait("document.querySelector('.answer .said').textContent === 'Yes.'")
        assert browser.evaluate("document.querySelector('.reasoning').open") is False
        assert browser.evaluate("document.querySelector('.thought').textContent") == "Hm, hm."
        browser.click(".reasoning summary")
        browser.wait("document.querySelector('.thought').getBoundingClientRect().height > 0")
        say(browser, "Sure?")
        browser.wait(ANSWERED + " === 2")

    await visit(master, browser, steps)
    assert browser.problems == []
    assert bytes(master.requests[1].prompt_token_ids).decode() == "<user>Is it?<assistant>Yes.<user>Sure?"


async def test_an_error_is_shown_and_a_key_is_asked_for(master, browser):
    def steps(url: str) -> None:
        browser.open(url + "/")
        browser.wait("document.activeElement.id === 'key'")  # the list of models is refused
        say(browser, "Hi")
        browser.wait("document.querySelector('.answer .failure').textContent.includes('API key')")
        browser.wait("document.activeElement.id === 'key'")
        browser.type("k")
        browser.press("Enter", 13)
        browser.wait("document.querySelector('#tape').dataset.state === 'live'")
        say(browser, "Hi again")
        browser.wait("document.querySelectorAll('.answer .said')[1]?.textContent === 'Hello world'")
        assert browser.evaluate("JSON.stringify(localStorage).includes('\"k\"')") is False
        assert browser.evaluate("sessionStorage.getItem('xllm-npu.key')") == "k"
        browser.evaluate("sessionStorage.clear()")

    await visit(master, browser, steps, api_key=("k",))


async def test_the_engine_s_page(master, browser):
    master.metrics.set_model("tiny", [{}, {}])
    loop = asyncio.get_running_loop()

    def engine(**figures: float) -> None:
        for rank in (0, 1):
            master.metrics.set_engine(rank, **figures)

    engine(running=3, waiting=2, kv_usage=0.25, steps_total=1, generation_tokens_total=10)

    def steps(url: str) -> None:
        browser.open(url + "/")
        browser.click("nav a[data-page=engine]")
        browser.wait("document.querySelector('.plate .badge')?.textContent === 'awake'")
        assert browser.evaluate("document.querySelector('#chat').hidden")
        assert browser.evaluate("document.querySelector('nav [aria-current]').textContent") == "Engine"
        dials = "[...document.querySelectorAll('.dial')].map((one) => one.innerText.replace(/\\s+/g, ' ')).join('; ')"
        assert "Running 6 requests; Waiting 4 requests" in browser.evaluate(dials)
        assert "25 % of 128 blocks" in browser.evaluate("document.querySelector('.kv-text').textContent")
        assert browser.evaluate("document.querySelectorAll('.ranks tbody tr').length") == 2
        loop.call_soon_threadsafe(lambda: engine(running=1, steps_total=50, generation_tokens_total=600,
                                                 last_step_seconds=0.02))
        browser.wait(dials + ".includes('Running 2 requests') && !" + dials + ".startsWith('Generated 0 ')")
        assert "Step 20.0 ms" in browser.evaluate(dials)
        browser.click("nav a[data-page=chat]")
        browser.wait("!document.querySelector('#chat').hidden")

    await visit(master, browser, steps)
    assert browser.problems == []


@pytest.mark.parametrize("width", [1280, 400])
async def test_keyboard_width_and_colours(master, browser, width):
    master.script = says("word " * 400, "`" + "y" * 300 + "`", "\n\n```\n" + "z" * 500 + "\n```",
                         "\n|a|\n|-|\n|" + "w " * 200)

    def steps(url: str) -> None:
        browser.size(width, 800)
        browser.open(url + "/")
        say(browser, "x" * 300)
        browser.wait(ANSWERED)
        for page in ("chat", "engine"):
            browser.evaluate(f"location.hash = '{page}'")
            browser.wait(f"!document.querySelector('#{page}').hidden")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
        browser.evaluate("location.hash = 'chat'")
        browser.evaluate("document.activeElement.blur()")
        reached = set()
        for _ in range(40):
            browser.press("Tab", 9)
            reached.add(browser.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert {"Engine", "theme", "key-button", "draft", "send"} <= reached
        if width < 1000:
            assert browser.evaluate("document.querySelector('#settings').hidden")
            browser.click("#settings-button")
            browser.wait("document.querySelector('#settings').contains(document.activeElement)")
            browser.press("Escape", 27)
            browser.wait("document.activeElement.id === 'settings-button'")
        paper = "getComputedStyle(document.body).backgroundColor"
        browser.prefer("light")
        light = browser.evaluate(paper)
        browser.prefer("dark")
        assert browser.evaluate(paper) != light
        browser.click("#theme")
        assert browser.evaluate(paper) == light
        browser.evaluate("localStorage.clear()")
        browser.size(1280, 800)

    await visit(master, browser, steps)
    assert browser.problems == []
