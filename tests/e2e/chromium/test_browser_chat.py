"""The console's chat by a person's steps, in a real browser, with a real language model."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from browser import Browser
from e2e.chromium.test_browser_console import FAINT, UNNAMED, no_overflow
from smollm2 import MARKS, chatting
from support import GUARD_S, until

pytestmark = MARKS

#: An engine of its own, which answers with the last message as it is.
ECHO = """
import json

class Echo:
    openai_api = True

    def initialize(self, context):
        pass

    def handle(self, data, context):
        context.set_response_content_type(0, "text/event-stream")
        body = data[0].get("body") or data[0].get("data")
        asked = body if isinstance(body, dict) else json.loads(bytes(body))
        delta = {"choices": [{"delta": {"content": asked["messages"][-1]["content"]}}]}
        return [f"data: {json.dumps(delta)}\\n\\ndata: [DONE]\\n\\n"]
"""
MARKUP = "<b>bold</b><img src=x onerror=\"document.title='ran'\">"
KEY = "a-management-key-of-the-test"
TALK = "return [...document.querySelectorAll('.talk article')].map((one) => [one.className, one.innerText])"


@pytest.fixture(scope="module")
def server(serving: Any, write_to: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    place = tmp_path_factory.mktemp("chat")
    (place / "store").mkdir()
    write_to(place / "store", "echo", ECHO)
    keys = {"disable_token_authorization": "false", "management_token": KEY, "inference_token": "x" * 16}
    models = "chat=chat.gguf,echo=echo"
    with chatting(serving, place, metrics_mode="prometheus", load_models=models, **keys) as server:
        yield server


@pytest.fixture
def chat(browser: Browser, server: Any) -> Iterator[Browser]:
    """The chat of the model `chat`, without a conversation."""
    browser.resize(1360, 860)
    browser.open(f"{server.http_management}/#/chat/1.0/play")
    browser.run("sessionStorage.setItem('torchrelay-key', arguments[0])", KEY)
    browser.open("about:blank")
    browser.open(f"{server.http_management}/#/chat/1.0/play")
    browser.wait_for("The conversation stays until the page is closed.")
    yield browser
    complaints = [one for one in browser.complaints() if "Failed to load resource" not in one]
    assert not complaints


def say(browser: Browser, text: str) -> None:
    browser.write("Message (Enter sends, Shift+Enter begins a line)", text)
    browser.click("Send")


def talk(browser: Browser) -> list[list[str]]:
    """The conversation as it is shown: who, and the text."""
    return [[who, text.partition("\n")[2]] for who, text in browser.run(TALK)]


def running(server: Any) -> float:
    text = httpx.get(f"http://127.0.0.1:{server.port('http_metrics')}/metrics", timeout=GUARD_S).text
    (value,) = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_a_conversation(chat: Browser, server: Any) -> None:
    """Questions are answered in their context; the numbers and the calls of programs are right."""
    chat.write("Temperature", "0")
    chat.write("Max tokens", "24")
    say(chat, "What is the capital of France? Answer with one sentence.")
    chat.wait_for("tokens/s")
    (_, question), (who, answer) = talk(chat)
    assert who == "assistant" and "Paris" in answer and question.startswith("What is")
    outcome = re.search(r"(\d+) tokens · first after [\d.]+ m?s · [\d.k]+ tokens/s", chat.text())
    assert outcome and 3 <= int(outcome[1]) <= 24

    chat.write("Message (Enter sends, Shift+Enter begins a line)", "Which country did I ask about?")
    curl, python = chat.run("return [...document.querySelectorAll('.chat .codes pre')].map((one) => one.innerText)")
    body = json.loads(shlex.split(curl.replace("\\\n", " "))[-1])
    assert [one["role"] for one in body["messages"]] == ["user", "assistant", "user"]
    assert body["temperature"] == 0 and body["max_tokens"] == 24 and body["stream"] is True
    assert f"{server.http}/v1/chat/completions" in curl and f'base_url="{server.http}/v1"' in python
    done = subprocess.run(
        ["sh", "-c", curl], env={"TOKEN": "x" * 16, "PATH": "/usr/bin:/bin"}, capture_output=True, timeout=GUARD_S
    )
    assert done.stdout.rstrip().endswith(b"data: [DONE]"), done
    compile(python, "console", "exec")

    chat.run("location.hash = '#/echo/1.0/play'")
    chat.wait_for("Playground")
    chat.run("location.hash = '#/chat/1.0/play'")
    until(lambda: len(talk(chat)) == 2, "the conversation is still there")
    chat.click("New chat")
    until(lambda: not talk(chat), "it is gone")


def test_stop_ends_the_request_in_the_engine(chat: Browser, server: Any) -> None:
    chat.write("Max tokens", "4000")
    say(chat, "Write a very long story about a dragon, with many chapters.")
    until(lambda: len(talk(chat)) == 2 and len(talk(chat)[1][1]) > 3, lambda: talk(chat))
    assert running(server) == 1
    chat.click("Stop")
    chat.wait_for("Stopped · ")
    until(lambda: running(server) == 0, "the engine computes nothing more")
    assert talk(chat)[1][1], "what had come stays"
    chat.write("Max tokens", "8")
    say(chat, "Go on.")
    until(lambda: len(talk(chat)) == 4 and "Stopped" not in chat.text(), lambda: talk(chat))


def test_what_the_server_refuses_is_said_and_the_question_stays(chat: Browser) -> None:
    chat.write("Max tokens", "8")
    long = "word " * 40_000
    field = "document.querySelector('.chat textarea')"
    chat.run(f"const field = {field}; field.value = arguments[0]; field.dispatchEvent(new Event('input'))", long)
    chat.click("Send")
    chat.wait_for("Failed: ")
    assert not talk(chat) and chat.run(f"return {field}.value").startswith("word word")


def test_texts_are_texts(chat: Browser, server: Any) -> None:
    """Markup in a question, in an answer and in the system prompt."""
    chat.open(f"{server.http_management}/#/echo/1.0/play")
    chat.write("System prompt", MARKUP)
    say(chat, MARKUP)
    until(lambda: talk(chat) == [["user", MARKUP], ["assistant", MARKUP]], lambda: talk(chat))
    assert not chat.run("return document.querySelector('.chat b, .chat img')") and "ran" not in chat.run(
        "return document.title"
    )


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("size", [(1360, 860), (390, 844)])
def test_the_chat_at_each_size_and_in_both_colours(chat: Browser, server: Any, size: Any, colours: str) -> None:
    chat.prefer(color_scheme=colours)
    chat.open(f"{server.http_management}/#/echo/1.0/play")
    say(chat, "look at me " * 20)
    until(lambda: len(talk(chat)) == 2 and talk(chat)[1][1], lambda: talk(chat))
    chat.resize(*size)
    assert no_overflow(chat) and chat.run(UNNAMED) == [] and chat.run(FAINT) == []
