"""What each error becomes: a status, and a body as OpenAI's API writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from regraft.runtime.errors import (
    EngineClosedError,
    EngineFailedError,
    EngineFullError,
    RequestError,
    TextError,
)
from regraft.runtime.output import RequestOutput

from .answers import error
from .streaming import ClientGone


def check_end(output: RequestOutput) -> None:
    """HTTPException where a request did not end as it should."""
    if output.finish_reason == "error":
        raise HTTPException(500, f"the request failed: {output.error}")
    if output.finish_reason == "cancelled":
        raise HTTPException(503, "the request was cancelled: the server ends, or nobody read it")


def body_of(problem: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer to an error."""
    if isinstance(problem, HTTPException):
        code = "model_not_found" if problem.status_code == 404 else None
        kind = "server_error" if problem.status_code >= 500 else "invalid_request_error"
        return problem.status_code, error(problem.detail, kind, code)
    if isinstance(problem, RequestValidationError):
        said = "; ".join(f"{_where(e['loc'])}: {e['msg']}" for e in problem.errors())
        return 400, error(said, "invalid_request_error")
    if isinstance(problem, EngineFullError):
        return 429, error(str(problem), "rate_limit_error", "queue_full")
    if isinstance(problem, (EngineClosedError, EngineFailedError)):
        return 503, error(str(problem), "server_error")
    if isinstance(problem, TextError):
        return 500, error(f"the request failed: {problem}", "server_error")
    if isinstance(problem, TimeoutError):
        return 504, error("the request took too long and was cancelled", "server_error")
    return 400, error(str(problem), "invalid_request_error")


def _where(place: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in place if part != "body") or "body"


async def _answer_problem(request: Request, problem: Exception) -> Response:
    status, body = body_of(problem)
    retry = problem.retry_after if isinstance(problem, EngineFullError) else None
    headers = {} if retry is None else {"Retry-After": str(retry)}
    return JSONResponse(body, status, headers)


async def _answer_nobody(request: Request, problem: Exception) -> Response:
    return Response(status_code=499)


def add_handlers(app: FastAPI) -> None:
    """Has the application answer every error that a call may raise."""
    kinds: tuple[type[Exception], ...] = (
        RequestError,
        EngineFailedError,
        TextError,
        TimeoutError,
        RequestValidationError,
        HTTPException,
    )
    for kind in kinds:
        app.add_exception_handler(kind, _answer_problem)
    app.add_exception_handler(ClientGone, _answer_nobody)
