"""The console by a person's steps, in a real browser: every click is a real one, and the visible page is checked."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from browser import Browser
from support import GUARD_S, until

pytestmark = pytest.mark.external

GREETING = """
def handle(data, context):
    if data is None:
        return []
    print("greeting", len(data), flush=True)
    bodies = [row["body"] for row in data]
    return [f"hello {body if isinstance(body, str) else bytes(body).decode()}" for body in bodies]
"""
#: Each word is sent once its turn has come: the test writes how many of them may go.
STORY = """
import time
from pathlib import Path
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return []
    turn = Path(context.system_properties["model_dir"]) / "turn"
    for number in range(3):
        while not turn.exists() or int(turn.read_text() or 0) <= number:
            time.sleep(0.01)
        send_intermediate_predict_response([f"word{number} "], context.request_ids, "more", 200, context)
    return ["end"]
"""
PICTURE = """
def handle(data, context):
    if data is None:
        return []
    return [{"bytes": len(row.get("body") or row.get("data"))} for row in data]
"""
DRAWN = """
def handle(data, context):
    if data is None:
        return []
    [context.set_response_content_type(index, "image/svg+xml") for index in range(len(data))]
    return ["<svg xmlns='http://www.w3.org/2000/svg'><script>document.title = 'ran'</script></svg>" for _ in data]
"""
ADDING = """
def handle(data, context):
    if data is None:
        return []
    return [{"total": row["a"] + row["a"]} for row in data]
"""
#: Its answer has the version, and a text that would be HTML if the page took it as such.
NAMED = """
def handle(data, context):
    version = context.manifest["model"]["modelVersion"]
    return None if data is None else [f"{version} <img src=x onerror='document.title=1'>"] * len(data)
"""
TENSORS = """
openInference:
  inputs: [{name: a, datatype: INT64, shape: [1, -1]}]
  outputs: [{name: total, datatype: INT64, shape: [1, -1]}]
"""
KEY = "a-management-key-of-the-test"


@pytest.fixture(scope="module")
def server(serving: Any, write_to: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("console")
    store = directory / "store"
    store.mkdir()
    write_to(store, "greeting", GREETING)
    write_to(store, "greeting", GREETING, version="2.0", directory="greeting-2")
    write_to(store, "story", STORY)
    write_to(store, "picture", PICTURE)
    write_to(store, "drawn", DRAWN)
    write_to(store, "adding", ADDING, config=TENSORS)
    write_to(store, "broken", "raise RuntimeError('the weights are not there')")
    with serving(directory, store, {}, ["--ncs"]) as server:
        yield server


def register(browser: Browser, url: str, **more: str) -> None:
    browser.click("Register a model")
    browser.write("Archive, folder or URL", url)
    for label, text in more.items():
        browser.write(label.replace("_", " "), text)
    browser.click("Register")


def rows(browser: Browser) -> list[str]:
    """The models of the list, as they are shown."""
    return list(browser.run("return [...document.querySelectorAll('#models tr')].map((row) => row.innerText)"))


def no_overflow(browser: Browser) -> bool:
    return bool(browser.run("return document.documentElement.scrollWidth <= innerWidth"))


@pytest.fixture(autouse=True)
def uncomplaining(browser: Browser) -> Iterator[None]:
    """No script fails, and the page's policy forbids nothing that the page does. Refused calls are expected ones."""
    yield
    complaints = [one for one in browser.complaints() if "Failed to load resource" not in one]
    assert not complaints


def test_a_day_at_the_console(browser: Browser, server: Any) -> None:
    browser.resize(1360, 860)
    browser.prefer(color_scheme="light")
    browser.open(f"{server.http_management}/")
    browser.wait_for("No model is served yet")
    browser.wait_for("live")

    register(browser, "broken")
    browser.wait_for("the weights are not there")  # the dialog says why, and stays
    browser.click("Cancel")

    register(browser, "greeting")
    browser.wait_for('Model "greeting" Version: 1.0 registered with 1 initial workers')
    until(lambda: any("greeting" in row and "1/1" in row for row in rows(browser)), lambda: rows(browser))
    browser.click("greeting")
    browser.wait_for("Throughput")

    browser.click("Playground")
    browser.click("Text")
    browser.write("What is sent", "Ada & 'Grace'")
    browser.click("Send")
    browser.wait_for("hello Ada & 'Grace'")
    browser.wait_for("Status 200")
    inference = server.port("http_inference")
    code = browser.run("return [...document.querySelectorAll('.codes pre')].map((one) => one.innerText)")
    assert all(f"http://127.0.0.1:{inference}/predictions/greeting/1.0" in one for one in code)
    assert "'Ada & '\\''Grace'\\'''" in code[0]
    compile(code[1], "console", "exec")

    browser.click("Live")
    until(lambda: "answered 0 " not in browser.text().replace("\n", " "), "the plots have seen the call")

    browser.click("Workers")
    browser.click(f"Log of worker {server.describe('greeting')['workers'][0]['id']}")
    browser.wait_for("greeting 1")  # what its handler has printed
    browser.click("Close")


def test_a_stream_is_shown_as_it_comes(browser: Browser, server: Any) -> None:
    browser.open(f"{server.http_management}/")
    register(browser, "story")
    browser.wait_for('Model "story" Version: 1.0 registered')
    browser.click("story")
    browser.click("Playground")
    browser.write("What is sent", "tell me")
    browser.click("Send")
    turn = server.store / "story" / "turn"
    for number in range(3):
        turn.write_text(str(number + 1))
        browser.wait_for(f"word{number} ".strip())
        assert number == 2 or f"word{number + 1}" not in browser.text()
    browser.wait_for("end")
    browser.wait_for("Status 200")

    turn.unlink()
    browser.click("Send")
    browser.click("Stop")
    browser.wait_for("nobody waits any more")


def test_why_a_worker_died(browser: Browser, server: Any) -> None:
    browser.open(f"{server.http_management}/#/greeting/1.0/workers")
    (pid,) = server.worker_pids("greeting")
    browser.wait_for(str(pid))
    os.kill(pid, signal.SIGKILL)
    browser.wait_for("killed by SIGKILL")
    until(lambda: server.worker_pids("greeting") not in ([], [pid]), "another worker is there")
    (new,) = server.worker_pids("greeting")
    browser.wait_for(str(new))
    browser.wait_for("greeting 1")  # the last lines of the one that died


def test_scaling_defaults_and_the_end_of_a_model(browser: Browser, server: Any) -> None:
    browser.open(f"{server.http_management}/#/greeting/1.0/workers")
    browser.click("Scale")
    browser.write("At least", "2")
    browser.run("document.querySelector('dialog input').focus()")
    browser.press("\ue007")  # Enter
    until(lambda: len(server.worker_pids("greeting")) == 2, "two workers")
    until(lambda: any("greeting" in row and "2/2" in row for row in rows(browser)), lambda: rows(browser))

    register(browser, "greeting-2", Workers="0")
    browser.wait_for('Model "greeting" Version: 2.0 registered with 0 initial workers')
    browser.open(f"{server.http_management}/#/greeting/2.0")
    browser.click("Make default")
    browser.click("Make default")  # in the dialog
    until(lambda: server.describe("greeting")["modelVersion"] == "2.0", "the other version is the default")
    browser.open(f"{server.http_management}/#/greeting/1.0")
    browser.click("Unregister")
    browser.click("Unregister")
    browser.wait_for("unregistered")
    until(lambda: not any("greeting" in row and "1.0" in row for row in rows(browser)), lambda: rows(browser))


def test_a_rollout_is_followed_and_changed(browser: Browser, server: Any, write_to: Callable[..., str]) -> None:
    """Curves of both versions, differing answers as texts, and each action by its dialog."""
    for version in ("1.0", "2.0"):
        write_to(server.store, "named", NAMED, version=version, directory=f"named-{version}")
        server.register(f"named-{version}")
    rollout = f"{server.http_management}/models/named/rollout"
    browser.open(f"{server.http_management}/#/named/1.0/rollout")
    browser.wait_for("named has no rollout")

    given = {"version": "2.0", "shadow": True, "steps": [30, 60]}
    assert httpx.put(rollout, json=given, timeout=GUARD_S).status_code == 200
    until(lambda: server.predict("named", "x") and httpx.get(rollout).json()["differences"], "copies are compared")
    browser.wait_for("2.0 in place of 1.0")
    browser.wait_for("2.0 <img src=x onerror='document.title=1'>")
    browser.wait_for("1 of 3 (copies, 30 %, 60 %)")
    assert browser.run("return document.querySelectorAll('.rollout img').length") == 0

    assert httpx.put(rollout, json={"version": "2.0", "steps": [50]}, timeout=GUARD_S).status_code == 200
    until(lambda: _both_asked(server, rollout), "both versions answer")
    browser.wait_for("50 % to 1.0, 50 % to 2.0")
    until(lambda: "–" not in _labels(browser)["Latency, p99"] and "–" not in _labels(browser)["Failed requests"])
    browser.click("Pause rollout")
    browser.click("Pause rollout")  # in the dialog
    browser.wait_for("The rollout of named 2.0 is paused")
    browser.click("Resume rollout")
    browser.click("Cancel")
    assert httpx.get(rollout).json()["state"] == "paused"
    browser.click("Promote")
    browser.click("Promote")
    browser.wait_for("promoted")
    assert server.describe("named")["modelVersion"] == "2.0"
    browser.click("Roll back")
    browser.click("Roll back")
    browser.wait_for("The rollout of named 2.0 is rolled back")
    assert server.describe("named")["modelVersion"] == "1.0"
    until(
        lambda: browser.run("return document.querySelectorAll('.rollout button').length") == 0, "nothing is left to do"
    )
    assert "Latency, p99" in _labels(browser)  # its curves stay


def _both_asked(server: Any, rollout: str) -> bool:
    server.predict("named", "x")
    return all(one["answered"] for one in httpx.get(rollout).json()["requests"].values())


def _labels(browser: Browser) -> dict[str, str]:
    """What each curve of the rollout tells screen readers, by its title."""
    found = browser.run("return [...document.querySelectorAll('.rollout [role=img]')].map((one) => one.ariaLabel)")
    return dict(label.partition(": ")[::2] for label in found)


def test_files_and_tensors(browser: Browser, server: Any, tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG" + bytes(100))
    browser.open(f"{server.http_management}/")
    for name in ("picture", "drawn", "adding"):
        register(browser, name)
        browser.wait_for(f'Model "{name}" Version: 1.0 registered')
    browser.open(f"{server.http_management}/#/picture/1.0/play")
    browser.click("Image or file")
    browser.choose_file("File, sent as it is", tmp_path / "picture.png")
    browser.click("Send")
    browser.wait_for('"bytes": 104')
    browser.open(f"{server.http_management}/#/drawn/1.0/play")
    browser.click("Text")
    browser.write("What is sent", "x")
    browser.click("Send")
    browser.wait_for("<svg xmlns=")  # a document with a script, shown as text
    browser.open(f"{server.http_management}/#/adding/1.0/play")  # begins with tensors, as the model declares them
    browser.click("Send")
    until(lambda: "Status 200" in browser.text() and '"total"' in browser.text(), browser.text)


VISIBLE = """
return [...document.querySelectorAll('#models tr')].filter((row) => {
  const box = row.getBoundingClientRect();
  return box.top >= 0 && box.bottom <= innerHeight;
}).length
"""
CUT = """
return [...document.querySelectorAll('#models a')].filter((one) => {
  const cell = one.closest('td').getBoundingClientRect(), box = one.getBoundingClientRect();
  return box.right > cell.right + 1 || box.height > 30;
}).map((one) => one.innerText)
"""


def test_many_models_fit_the_page_until_one_is_chosen(
    browser: Browser, serving: Any, write_to: Callable[..., str], tmp_path: Path
) -> None:
    """61 rows at 1280 x 800, with their whole names and the reason of the one that fails; the only model is shown."""
    store = tmp_path / "store"
    store.mkdir()
    names = [f"text_streaming_model_{number}" for number in range(60)]
    for name in names:
        write_to(store, name, GREETING)
    write_to(store, "broken", "raise RuntimeError('the weights are not there')")
    settings = {"default_workers_per_model": 0, "enable_model_api": "true"}
    server = serving(tmp_path, store, settings, ["--ncs", "--models", names[0]])
    try:
        server.wait_started()
        browser.resize(1280, 800)
        browser.open("about:blank")
        browser.open(f"{server.http_management}/")
        browser.wait_for("Throughput")  # of the only model, chosen by itself
        for name in (*names[1:], "broken"):
            server.register(name, initial_workers=0)
        httpx.put(f"{server.http_management}/models/broken?min_worker=1", timeout=GUARD_S)
        browser.open("about:blank")
        browser.open(f"{server.http_management}/")
        until(lambda: len(rows(browser)) == 61, lambda: len(rows(browser)))
        until(lambda: any("the weights are not there" in row for row in rows(browser)), "the reason is in its row")
        assert browser.run(VISIBLE) >= 20 and browser.run(CUT) == [] and no_overflow(browser)
        browser.click(names[0])
        browser.wait_for("Throughput")
        assert browser.run(CUT) == [] and no_overflow(browser)
        browser.run("document.querySelector('.skip').click()")
        assert "Throughput" in browser.text(), "the model stays"
        back = "const back = document.querySelector('.back'); back.click(); return back.checkVisibility()"
        assert browser.run(back), "the way back is shown at every width"
        until(lambda: browser.run(VISIBLE) >= 20, "the list is the page again")
    finally:
        server.terminate()
        browser.resize(1360, 860)


def test_the_page_of_the_calls_begins_with_predictions(browser: Browser, server: Any) -> None:
    for address in (server.http, server.http_management):
        browser.open(f"{address}/docs")
        browser.wait_for("Find a call")
        groups = browser.run("return [...document.querySelectorAll('#operations h2')].map((one) => one.innerText)")
        assert groups[0] == ("Predictions" if address == server.http else "Models and workers"), groups


SIZES = {"desktop": (1360, 860), "tablet": (900, 1100), "phone": (390, 844)}


@pytest.mark.parametrize("size", SIZES)
def test_every_size_and_both_colours(browser: Browser, server: Any, size: str) -> None:
    """Nothing is wider than the page, texts contrast with their background, and every control has a name."""
    browser.resize(*SIZES[size])
    for place in (
        "",
        "/#/story/1.0/live",
        "/#/story/1.0/workers",
        "/#/named/1.0/rollout",
        "/#/story/1.0/play",
        "/#/story/1.0/settings",
        "/docs",
    ):
        browser.open("about:blank")
        browser.open(f"{server.http_management}{place}")
        browser.wait_for({"/docs": "Find a call", "/#/named/1.0/rollout": "Decisions"}.get(place, "story"))
        assert no_overflow(browser), (place, size)
        assert browser.run(UNNAMED) == [], place
        for colours in ("light", "dark"):
            browser.prefer(color_scheme=colours, reduced_motion="reduce")
            assert browser.run("return matchMedia(`(prefers-color-scheme: ${arguments[0]})`).matches", colours)
            assert browser.run(FAINT) == [], (place, colours)
    browser.resize(1360, 860)


#: Controls and pictures without a name for screen readers.
UNNAMED = """
return [...document.querySelectorAll('button, a, input, select, textarea, canvas, [role=img]')].filter((one) => {
  if (!one.checkVisibility()) return false;
  if (one.tagName === 'CANVAS') return !one.closest('[role=img][aria-label]');
  const label = one.labels && [...one.labels].map((each) => each.innerText || each.textContent).join('');
  return !(one.getAttribute('aria-label') || one.innerText || label || '').trim();
}).map((one) => one.outerHTML.slice(0, 200));
"""
#: Texts whose contrast with what is behind them is below 4.5 to 1 (WCAG 2.2, 1.4.3).
FAINT = """
const numbers = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const light = ([red, green, blue]) => {
  const part = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  return 0.2126 * part(red) + 0.7152 * part(green) + 0.0722 * part(blue);
};
const behind = (element) => {
  for (let one = element; one; one = one.parentElement) {
    const colour = numbers(getComputedStyle(one).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
const found = [];
for (const element of document.body.querySelectorAll('*')) {
  const text = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()).join('');
  if (!text || !element.checkVisibility() || element.disabled || element.closest('.u-axis, :disabled')) continue;
  const [one, other] = [light(numbers(getComputedStyle(element).color)), light(behind(element))];
  const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  if (contrast < 4.5) found.push(`${text.slice(0, 60)}: ${contrast.toFixed(2)}`);
}
return found;
"""


def test_the_keyboard_alone(browser: Browser, server: Any) -> None:
    browser.open("about:blank")
    browser.open(f"{server.http_management}/#/story/1.0/live")
    browser.wait_for("Throughput")
    browser.run("document.getElementById('tab-live').focus()")
    browser.press("\ue014")  # to the right
    assert browser.run("return document.activeElement.id") == "tab-workers"
    browser.wait_for("Failures in a row")
    browser.run("document.getElementById('register').focus()")
    browser.press("\ue007")
    browser.wait_for("Archive, folder or URL")
    assert browser.run("return document.activeElement.name") == "url"
    browser.press("\ue00c")  # Escape
    until(lambda: browser.run("return document.activeElement.id") == "register", "the focus is back")


def test_the_pause_and_the_return_of_a_lost_connection(browser: Browser, server: Any) -> None:
    browser.open("about:blank")
    browser.open(f"{server.http_management}/")
    browser.wait_for("live")
    browser.click("Pause")
    browser.wait_for("paused")
    browser.click("Resume")
    browser.wait_for("live")


def test_calls_can_be_tried_out(browser: Browser, server: Any) -> None:
    browser.open(f"{server.http}/docs")
    browser.wait_for("Find a call")
    browser.write("Find a call", "predictions default")
    assert "/v2/health/live" not in browser.text()
    browser.run("document.querySelector('details:not([hidden])').open = true")
    until(lambda: browser.run("return document.querySelectorAll('form').length") == 1, "the form is there")
    browser.write("model_name", "nobody")
    browser.click("Try it")
    browser.wait_for("Model not found: nobody")
    browser.wait_for("Status 404")


def test_the_page_of_the_inference_address_leads_here(browser: Browser, server: Any) -> None:
    browser.open(f"{server.http}/")
    browser.click("The console: models, workers, queues, a playground")
    browser.wait_for("Calls / s")


def test_a_server_with_keys_asks_once(
    browser: Browser, serving: Any, write_to: Callable[..., str], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    write_to(store, "greeting", GREETING)
    settings = {"disable_token_authorization": "false", "management_token": KEY, "inference_token": "x" * 16}
    with serving(tmp_path, store, settings, ["--ncs", "--models", "greeting"]) as server:
        browser.open(f"{server.http_management}/")
        browser.wait_for("This server needs a key")
        assert "greeting" not in browser.text()
        browser.write("Management key", "not the key at all")
        browser.click("Open the console")
        browser.wait_for("Token")  # the server's own words
        browser.write("Management key", KEY)
        browser.click("Open the console")
        browser.wait_for("greeting")
        browser.open(f"{server.http_management}/#/greeting/1.0/play")
        browser.write("What is sent", "Ada")
        browser.click("Send")
        browser.wait_for("hello Ada")  # with the management key, at the management address
        assert KEY not in browser.text()
        assert browser.run(
            "return localStorage.length === 0 || !JSON.stringify(localStorage).includes(arguments[0])", KEY
        )
        connection = http.client.HTTPConnection("127.0.0.1", server.port("http_management"), timeout=GUARD_S)
        connection.request("GET", "/console/events")
        refused = connection.getresponse()
        assert refused.status == 400 and json.loads(refused.read())["type"] == "InvalidKeyException"
        connection.close()
    assert not re.search(KEY, server.log)
