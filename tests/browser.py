"""Chromium without a window, driven through ChromeDriver as a person would: pages, elements, clicks, keys, pictures."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import GUARD_S, until

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    # Names that were made to mean this machine, and its own.
    "--host-resolver-rules=MAP rebound.example 127.0.0.1, MAP told.example 127.0.0.1",
)
#: Runs in the page: what the answer was, or which error the browser gave the page instead.
FETCH = """
const [url, options, done] = [arguments[0], arguments[1], arguments[arguments.length - 1]];
fetch(url, options).then(
  async (answer) => done({status: answer.status, type: answer.type, text: await answer.text()}),
  (error) => done({error: error.name}),
);
"""


SUBMIT = """
const [url, method, encoding] = arguments;
const form = Object.assign(document.createElement("form"), {action: url, method, enctype: encoding});
form.append(Object.assign(document.createElement("input"), {name: '{"parameters": {"x": "', value: '"}}'}));
document.body.append(form);
form.submit();
"""


#: Errors of ChromeDriver for elements that aren't there, or not yet in reach.
UNREACHED = {
    *("no such element", "stale element reference", "element not interactable"),
    *("element click intercepted", "invalid element state"),
}


class Browser:
    """A session of ChromeDriver."""

    def __init__(self, port: int, chromium: str, profile: Path) -> None:
        self._port = port
        options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        asked = {"capabilities": {"alwaysMatch": wanted}}
        self._session = f"/session/{self._ask('POST', '/session', asked)['sessionId']}"
        self._ask("POST", f"{self._session}/timeouts", {"script": GUARD_S * 1000})

    def _ask(self, method: str, path: str, value: object = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=GUARD_S)
        connection.request(method, path, None if value is None else json.dumps(value))
        response = connection.getresponse()
        answer = json.loads(response.read())["value"]
        connection.close()
        assert response.status == 200, answer
        return answer

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def fetch(self, url: str, **options: Any) -> dict[str, Any]:
        """`fetch` in the open page."""
        return dict(self._ask("POST", f"{self._session}/execute/async", {"script": FETCH, "args": [url, options]}))

    def text(self) -> str:
        """The text of the open page."""
        script = {"script": "return document.documentElement.innerText", "args": []}
        return str(self._ask("POST", f"{self._session}/execute/sync", script))

    def origin(self) -> str:
        """The origin of the open page: "null" for a document in a sandbox."""
        return str(self.run("return self.origin"))

    def submit(self, url: str, method: str, encoding: str) -> str:
        """Sends a form of the open page to `url`, with a JSON text in it, and returns the result."""
        self._ask("POST", f"{self._session}/execute/sync", {"script": SUBMIT, "args": [url, method, encoding]})
        until(lambda: self._ask("GET", f"{self._session}/url").startswith(url), "the answer is there")
        return self.text()

    # --- as a person does

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of a script in the open page."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": arguments})

    def _on_element(self, xpath: str, deed: str, value: object) -> bool:
        """Does it to the first such element; False while there is none that can be reached."""
        try:
            found = self._ask("POST", f"{self._session}/element", {"using": "xpath", "value": xpath})
            self._ask("POST", f"{self._session}/element/{next(iter(found.values()))}/{deed}", value)
        except AssertionError as error:
            answer = error.args[0]
            if isinstance(answer, dict) and answer.get("error") in UNREACHED:
                return False
            raise
        return True

    def click(self, name: str) -> None:
        """Clicks the button, link, tab or choice of that name: in the open dialog, else on the page."""
        said = f"(normalize-space(.)={json.dumps(name)} or @aria-label={json.dumps(name)})"
        kinds = "self::button or self::a or self::label or self::summary"
        inside = (
            "/html/body//dialog[@open]//*" if self.run("return !!document.querySelector('dialog[open]')") else "//*"
        )
        xpath = f"{inside}[({kinds}) and {said}]"
        until(lambda: self._on_element(xpath, "click", {}), f"something to click that says {name!r}")

    def write(self, label: str, text: str) -> None:
        """Replaces the content of the field with that label."""
        control = "*[self::input or self::textarea]"
        xpath = f"//label[span[normalize-space(.)={json.dumps(label)}]]//{control}"
        until(lambda: self._on_element(xpath, "clear", {}), f"a field {label!r}")
        assert self._on_element(xpath, "value", {"text": text})

    def choose_file(self, label: str, path: Path) -> None:
        xpath = f"//label[span[normalize-space(.)={json.dumps(label)}]]//input[@type='file']"
        until(lambda: self._on_element(xpath, "value", {"text": str(path)}), f"a field {label!r}")

    def press(self, keys: str) -> None:
        """Types into the focused element; WebDriver's code points stand for special keys."""
        typed = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("POST", f"{self._session}/actions", {"actions": [{"type": "key", "id": "keys", "actions": typed}]})

    def wait_for(self, text: str) -> None:
        """Returns when the page shows it."""
        until(lambda: text in self.text(), f"the page shows {text!r}")

    def resize(self, width: int, height: int) -> None:
        """The size of the page itself, in its pixels, as a phone's or a screen's."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", **metrics)

    def prefer(self, **features: str) -> None:
        """Sets the user's media preferences: `color_scheme="dark"`, `reduced_motion="reduce"`."""
        named = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self._command("Emulation.setEmulatedMedia", features=named)

    def _command(self, name: str, **parameters: Any) -> Any:
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def complaints(self) -> list[str]:
        """The browser's complaints since the last call: errors of scripts, violations of the page's policy."""
        entries = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", f"{self._session}/screenshot")))

    def close(self) -> None:
        self._ask("DELETE", self._session)


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile in that folder. Skips the test without Chromium."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or chromium is None:
        pytest.skip("Chromium and ChromeDriver are not installed (Debian's packages: chromium, chromium-driver)")
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        assert process.stdout is not None
        try:
            said = ""
            while not (match := re.search(r"started successfully on port (\d+)", said)):
                line = process.stdout.readline()
                assert line, said
                said += line
            browser = Browser(int(match[1]), chromium, profile)
            yield browser
            browser.close()
        finally:
            process.terminate()
