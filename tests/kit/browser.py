"""Chromium, driven over the WebDriver protocol: no library is needed for the little that a test asks of it."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

START_S = 30.0
ANSWER_S = 60.0
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


def missing() -> str:
    """Return the reason why no page can be driven on this machine; "" if one can."""
    if shutil.which("chromedriver") is None:
        return "chromedriver is not installed"
    found = any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    return "" if found else "Chromium is not installed"


class Browser:
    """One window of a browser."""

    def __init__(self, base: str) -> None:
        self.base = base

    def call(self, method: str, path: str, **values: Any) -> Any:
        body = json.dumps(values).encode() if method == "POST" else None
        request = urllib.request.Request(self.base + path, body, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, url: str) -> None:
        self.call("POST", "/url", url=url)

    def run(self, script: str) -> Any:
        return self.call("POST", "/execute/sync", script=script, args=[])

    def until(self, script: str, limit_s: float = START_S) -> Any:
        """Wait until `script` returns something true, and return it."""
        deadline = time.monotonic() + limit_s
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, f"not within {limit_s:g} s: {script}"
            time.sleep(0.1)
        return found

    def complaints(self) -> list[str]:
        """The messages in the console of the page."""
        return [line["message"] for line in self.call("POST", "/se/log", type="browser")]

    def scheme(self, name: str) -> None:
        """Prefer `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("POST", "/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"features": features})

    def picture(self) -> bytes:
        return base64.b64decode(self.call("GET", "/screenshot"))


def _until_up(base: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(base + "/status", timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "chromedriver did not start"
            time.sleep(0.1)


def _free() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def browser(width: int = 1280, height: int = 860, start: Callable[..., Any] = subprocess.Popen) -> Iterator[Browser]:
    port = _free()
    process = start(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}"
    try:
        _until_up(base)
        options = {"args": [*FLAGS, f"--window-size={width},{height}"]}
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        session = Browser(base).call("POST", "/session", capabilities=wanted)["sessionId"]
        window = Browser(f"{base}/session/{session}")
        try:
            yield window
        finally:
            window.call("DELETE", "")
    finally:
        process.terminate()
        process.wait(10)
