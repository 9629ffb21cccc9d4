"""A headless Chromium, driven over its DevTools protocol; nothing else of a browser's kind needed.

Found as `chromium-headless-shell` or `chromium`, as Debian packages them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

BINARY = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))), None)

_KEYS = {"Escape": 27, "Enter": 13, "ArrowDown": 40, "ArrowUp": 38, "ArrowRight": 39, "Tab": 9}


class BrowserPage:
    """One tab.

    Attributes:
        problems: Uncaught exceptions, errors on the console, violations of the content policy.
        requested: Addresses that the tab asked for.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._session = ""
        self.problems: list[str] = []
        self.requested: list[str] = []

    async def send(self, method: str, **params: Any) -> Any:
        """One command's result."""
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(
            {**message, "sessionId": self._session} if self._session else message
        )
        try:
            async with asyncio.timeout(30):
                return await self._waiting[number]
        finally:
            del self._waiting[number]

    async def attach(self, width: int) -> None:
        """Open the tab, `width` pixels wide."""
        target = await self.send("Target.createTarget", url="about:blank")
        attached = await self.send(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    async def goto(self, url: str) -> None:
        """Load an address and wait for its document."""
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited where it is a promise."""
        found = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 20.0) -> None:
        """Wait until the expression is truthy."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.evaluate(f"!!({expression})"):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            body = await self.evaluate("document.body.innerText.slice(0, 3000)")
            raise AssertionError(f"never true: {expression}\n{body}\n{self.problems}") from None

    async def press(self, key: str) -> None:
        """Press and release a key, as a hand would."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        known = {"key": key, "windowsVirtualKeyCode": _KEYS.get(key, ord(key[0]))}
        await self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **known)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **known)

    async def prefer(self, scheme: str) -> None:
        """`dark` or `light`."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.send("Emulation.setEmulatedMedia", features=[feature])

    async def listen(self) -> None:
        """Take messages until the browser goes."""
        async for message in self._socket:
            self._take(json.loads(message.data))

    def _take(self, message: dict[str, Any]) -> None:
        waiting = self._waiting.get(message.get("id", 0))
        if waiting is not None and not waiting.done():
            if "error" in message:
                waiting.set_exception(AssertionError(message["error"]))
            else:
                waiting.set_result(message["result"])
        params, method = message.get("params", {}), message.get("method")
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])


@contextlib.asynccontextmanager
async def browser_page(folder: Path, *, width: int = 1280) -> AsyncIterator[BrowserPage]:
    """A tab of a browser of its own, whose profile is in `folder`."""
    assert BINARY is not None
    process = await asyncio.create_subprocess_exec(
        BINARY, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
        f"--user-data-dir={folder / 'browser'}", "--no-first-run", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        address = await _address(process, folder / "browser" / "DevToolsActivePort")
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(address, max_msg_size=64 * 1024 * 1024) as socket,
        ):
            page = BrowserPage(socket)
            listening = asyncio.create_task(page.listen())
            try:
                await page.attach(width)
                yield page
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
    finally:
        # Debian's command is a shell script around the browser, which has children of its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _address(process: asyncio.subprocess.Process, file: Path) -> str:
    """Where it listens: port and path, which it writes into its profile."""
    async with asyncio.timeout(60):
        while not (file.is_file() and len(lines := file.read_text().splitlines()) == 2):
            assert process.returncode is None, "the browser ended before it listened"
            await asyncio.sleep(0.05)
    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
