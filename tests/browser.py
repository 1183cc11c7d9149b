"""A browser for the tests: headless Chromium, told what to do over the DevTools protocol.

`python -m tests.browser` installs it where that is possible. Where there is none, tests of pages
are skipped and say why. The browser resolves no names and reaches no network; every request that a
page makes is on record.
"""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
HOW = "as root: apt-get install -y chromium"
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-extensions
    --disable-background-networking --disable-component-update --disable-sync
    --disable-dev-shm-usage
    --no-default-browser-check --password-store=basic --use-mock-keychain --mute-audio
    --proxy-server=127.0.0.1:9 --remote-debugging-pipe""".split()
# Chromium reads commands from file 3 and writes answers to file 4.
_PLACE_PIPES = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """Returns the program of a Chromium on this machine, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@functools.cache
def missing() -> str:
    """Returns why tests of pages cannot run here, or an empty string."""
    program = find()
    if program is None:
        return f"there is no Chromium; {HOW}"
    try:
        asked = subprocess.run(
            [program, "--version"], capture_output=True, timeout=300, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{program} does not start: {error}"
    return "" if asked.returncode == 0 else f"{program} does not start; {HOW}"


def install() -> str:
    """Installs Chromium where it is missing and apt-get can; returns one line about it."""
    if not missing():
        return f"Chromium is {find()}"
    if not shutil.which("apt-get") or os.geteuid() != 0:
        return f"tests of pages will be skipped: {missing()}"
    calm = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    get = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"]
    for command in (get, ["apt-get", "update", "-qq"], get):
        done = subprocess.run(command, env=calm, capture_output=True, text=True, check=False)
        missing.cache_clear()
        if not missing():
            return f"Chromium is installed: {find()}"
    told = done.stderr.strip().splitlines()
    reason = told[-1] if told else missing()
    return f"tests of pages will be skipped: Chromium cannot be installed: {reason}"


class Browser:
    """One page of a headless Chromium with a profile of its own; a context manager.

    Attributes:
        requests: the addresses of everything that was asked for since the last `open`.
        problems: errors of scripts since then.
    """

    def __init__(self, width: int = 1300, height: int = 900) -> None:
        program = find()
        assert program is not None
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True)
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        place = [sys.executable, "-c", _PLACE_PIPES, str(commands), str(answers)]
        options = [f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            [*place, program, *FLAGS, *options, "about:blank"],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._unread = b""
        self._count = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._commands)
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
        self._profile.cleanup()

    def open(self, page: Path | str) -> None:
        """Opens a file, or an address of this machine, and waits until it is loaded."""
        address = page if isinstance(page, str) else page.as_uri()
        self.requests.clear()
        self.problems.clear()
        self.call("Page.navigate", url=address)
        while self.evaluate("document.readyState") != "complete" or (
            self.evaluate("location.href") != address
        ):
            time.sleep(0.02)

    def evaluate(self, script: str) -> object:
        """Returns the value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Presses a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def type(self, text: str) -> None:
        """Types text into what has the focus."""
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Clicks in the middle of the first element that a CSS selector finds."""
        place = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        x, y = place  # type: ignore[misc]
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            clicks = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **clicks)

    def dark(self, wanted: bool) -> None:
        """Makes the user prefer dark pages, or light ones."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screen(self, width: int, height: int = 900, mobile: bool = False) -> None:
        """Sets the size of the screen."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def call(self, method: str, **params: object) -> dict:
        """Calls a method of the DevTools protocol and returns its result."""
        self._count += 1
        message: dict = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _next(self, seconds: float = 60) -> dict:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], seconds)
            assert ready, f"the browser has not answered for {seconds:.0f} s"
            read = os.read(self._answers, 1 << 16)
            assert read, "the browser has gone"
            self._unread += read
        first, _, self._unread = self._unread.partition(b"\0")
        return json.loads(first)

    def _note(self, event: dict) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))


if __name__ == "__main__":
    print(install())
