"""Headless Chromium through its debugging pipe: enough of it to open a page, click, look and take a picture."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any, Self

TIMEOUT_S = 120.0  # a busy machine of two cores


def find_chromium() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Chromium:
    """A browser with one page."""

    def __init__(self, profile: Path, width: int = 1240, height: int = 900) -> None:
        executable = find_chromium()
        if executable is None:
            raise RuntimeError("there is no Chromium; look with find_chromium first")
        from_us, to_us = os.pipe(), os.pipe()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
        ]

        def connect() -> None:
            """It reads commands from descriptor 3 and answers on 4."""
            reading, writing = os.dup(from_us[0]), os.dup(to_us[1])
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self._process = subprocess.Popen(
            [executable, *options, "about:blank"],
            preexec_fn=connect,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us[0])
        os.close(to_us[1])
        self._commands, self._answers = os.fdopen(from_us[1], "wb"), os.fdopen(to_us[0], "rb")
        self._watchdog = threading.Timer(TIMEOUT_S, self._process.kill)  # a hang becomes the end of the pipe
        self._watchdog.start()
        self._last_id = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self._attach()

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.absolute().as_uri())
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.protocol") != "file:":
            pass

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def click(self, selector: str, index: int = 0) -> None:
        """A mouse click in the middle of an element's left part, where its text is."""
        place = self.evaluate(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{index}];"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + Math.min(r.width / 2, 40), r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def resize(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (answer := self._receive()).get("id") != self._last_id:
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.errors.append(json.dumps(answer["params"]))
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        self._watchdog.cancel()
        self._process.kill()
        self._process.wait()
        self._commands.close()
        self._answers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _attach(self) -> None:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next((target for target in targets if target["type"] == "page"), None)
        target_id = page["targetId"] if page else self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target_id, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _receive(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("Chromium ended, or took too long")
            message += byte
        return json.loads(message)
