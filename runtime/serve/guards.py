"""What a request has to pass before anything reads it: its size and its key."""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .answers import error

OPEN_PATHS = ("/health",)


class BodyLimit:
    """Answers 413 to bodies above `max_bytes`, announced or not; smaller ones are passed on whole."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = _header(scope, b"content-length") or b"0"
        size = int(announced) if announced.isdigit() else self._max_bytes + 1
        body = bytearray()
        more = size <= self._max_bytes
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client has gone
            body += message.get("body", b"")
            size = max(size, len(body))
            more = message.get("more_body", False) and size <= self._max_bytes
        if size > self._max_bytes:
            text = f"the body is larger than {self._max_bytes} bytes"
            await _refuse(send, 413, text, "invalid_request_error")
            return
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, replay, send)


class KeyGuard:
    """Answers 401 to whoever does not send the key, except on `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._wanted = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = _header(scope, b"authorization") or b""
            if not hmac.compare_digest(given, self._wanted):
                text = "the API key is missing or wrong: send it as 'Authorization: Bearer ...'"
                headers = [(b"www-authenticate", b"Bearer")]
                await _refuse(send, 401, text, "invalid_request_error", "invalid_api_key", headers)
                return
        await self._app(scope, receive, send)


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


async def _refuse(
    send: Send,
    status: int,
    text: str,
    kind: str,
    code: str | None = None,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    body = json.dumps(error(text, kind, code)).encode()
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})
