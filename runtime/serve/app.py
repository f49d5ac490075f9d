"""The application: its routes, and what stands before them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regraft.runtime.engine import Engine

from .guards import BodyLimit, KeyGuard
from .metrics import Metrics
from .problems import add_handlers
from .protocol import ChatBody, CompletionBody
from .service import Service
from .settings import ServeSettings

_ERROR = {"content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request asks for something that cannot be", **_ERROR},
    401: {"description": "The API key is missing or wrong", **_ERROR},
    404: {"description": "No such model", **_ERROR},
    413: {"description": "The body is too large", **_ERROR},
    429: {"description": "The queue is full", **_ERROR},
    500: {"description": "The request failed", **_ERROR},
    503: {"description": "The server ends, or has failed", **_ERROR},
    504: {"description": "The request took too long", **_ERROR},
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The completion",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
    **_ERRORS,
}


def create_app(engine: Engine, settings: ServeSettings) -> FastAPI:
    """The application that serves `engine`, which has a tokenizer."""
    if engine.tokenizer is None:
        raise ValueError("the engine has no tokenizer: wrap the model with one")
    service = Service(engine, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.served.start()
        try:
            yield
        finally:
            await service.served.drain(timeout=settings.drain_seconds)

    app = FastAPI(title="Regraft", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    add_handlers(app)
    _add_routes(app, service)
    app.add_middleware(_Counted, metrics=service.metrics)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.api_key:
        app.add_middleware(KeyGuard, api_key=settings.api_key)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=_ANSWERS, response_class=JSONResponse)
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await service.complete(body, request)

    @app.post("/v1/chat/completions", responses=_ANSWERS, response_class=JSONResponse)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await service.chat(body, request)

    @app.get("/v1/models", responses={401: _ERRORS[401]})
    async def models() -> dict[str, Any]:
        return service.models()

    @app.get("/v1/models/{name:path}", responses={k: _ERRORS[k] for k in (400, 401, 404)})
    async def model(name: str) -> dict[str, Any]:
        return service.model(name)

    @app.get("/health", responses={503: {"description": "It ends, or has failed"}})
    async def health() -> JSONResponse:
        status, word = service.health()
        return JSONResponse({"status": word}, status)

    @app.get("/metrics", response_class=Response, responses={401: _ERRORS[401]})
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


class _Counted:
    """Counts calls by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self._metrics.called(path, message["status"])
            await send(message)

        await self._app(scope, receive, counting)
