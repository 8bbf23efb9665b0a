"""Headless Chromium, driven as its developer tools drive it: real mouse, real keys, real errors."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.system_tools import system_tool

WAIT_S = 30.0
CONTROL_KEY = 2


class Browser:
    """One page in one browser. Sends commands of the DevTools protocol, collects its events."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        """Exceptions, errors on the console, refused content."""
        self.loaded: list[str] = []
        """Addresses that the page asked for."""
        self._socket = socket
        self._session: str | None = None
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def open(self, path: Path, scheme: str) -> None:
        """Show the page, with a preferred colour scheme."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.call(f"{domain}.enable")
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        await self.call("Page.navigate", url=path.as_uri())
        await self.wait_for("document.body && document.body.dataset.bars")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        return await asyncio.wait_for(answer, WAIT_S)

    async def evaluate(self, expression: str) -> Any:
        """Its value. Raises AssertionError if it throws."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def wait_for(self, expression: str) -> Any:
        """Its first true value."""
        deadline_s = time.monotonic() + WAIT_S
        while not (value := await self.evaluate(expression)):
            assert time.monotonic() < deadline_s, f"never true: {expression}"
            await asyncio.sleep(0.02)
        return value

    async def mouse(self, kind: str, x: float, y: float, **params: Any) -> None:
        """kind: mouseMoved, mousePressed, mouseReleased, mouseWheel"""
        await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **params)

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key)

    async def screenshot(self, path: Path) -> None:
        answer = await self.call("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(answer["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader

    async def _read(self) -> None:
        async for message in self._socket:
            content = message.json()
            if "id" in content:
                answer = self._answers.pop(content["id"])
                if "error" in content:
                    answer.set_exception(AssertionError(content["error"]))
                else:
                    answer.set_result(content["result"])
            else:
                self._note(content["method"], content["params"])

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.loaded.append(params["request"]["url"])


@contextlib.asynccontextmanager
async def browse(
    path: Path, scheme: str = "light", size: tuple[int, int] = (1300, 800)
) -> AsyncIterator[Browser]:
    """The page in a window of so many pixels. Without Chromium the test is skipped; see
    system_tool."""
    with _chromium(size) as url:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(url, max_msg_size=0) as socket,
        ):
            browser = Browser(socket)
            try:
                await browser.open(path, scheme)
                yield browser
            finally:
                await browser.close()


@contextlib.contextmanager
def _chromium(size: tuple[int, int]) -> Iterator[str]:
    """A running one; the address of its developer tools."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        log = Path(profile) / "stderr.txt"
        command = [
            system_tool("chromium", "chromium"), "--headless=new", "--disable-gpu",
            # a sandbox cannot be set up by root in a container; only our own pages are shown
            "--no-sandbox", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars", "--force-device-scale-factor=1",
            "--remote-debugging-port=0", f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}", "about:blank",
        ]  # fmt: skip
        with log.open("w") as said, subprocess.Popen(command, stderr=said) as process:
            try:
                yield _address(Path(profile), process, log)
            finally:
                process.terminate()


def _address(profile: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    """Of its developer tools, which it writes into its profile; the last line may take a moment."""
    written = profile / "DevToolsActivePort"
    deadline_s = time.monotonic() + WAIT_S
    while not (written.exists() and written.read_text().count("\n") == 1):
        is_late = time.monotonic() > deadline_s
        assert process.poll() is None and not is_late, f"Chromium did not start: {log.read_text()}"
        time.sleep(0.02)
    port, path = written.read_text().split("\n")
    return f"ws://127.0.0.1:{port}{path}"
