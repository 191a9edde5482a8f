"""What is refused, and how: errors in OpenAI's shape."""

from __future__ import annotations

import logging
from itertools import groupby
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from kvant.errors import CacheError, ContextError
from kvant.server.response_writers import make_error
from kvant.server.service import find_status
from kvant.server.tokenizer_pool import ServerBusy

log = logging.getLogger("kvant")

TYPE_NAMES = ("body", "str", "int", "bool", "float", "list")


class BadRequest(ValueError):
    """Something a client said, and the field in which it did."""

    def __init__(self, message: str, param: str | None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ValidationError)  # of a request that becomes another one
    @app.exception_handler(RequestValidationError)
    async def invalid(http: Request, error: RequestValidationError | ValidationError) -> Response:
        first = max(error.errors(), key=lambda one: len(one["loc"]))  # of a choice, the nearest
        place = [str(part) for part in first["loc"] if not _is_type_name(part)]
        param = ".".join(part for part, _ in groupby(place)) or None  # once, what names a kind too
        if first["type"] == "extra_forbidden":
            told, code = f"{param}: not supported", "unsupported_parameter"
        elif first["type"] == "json_invalid":
            told, param, code = f"the body is no JSON: {first['ctx']['error']}", None, None
        elif first["type"] == "value_error":
            told, code = str(first["ctx"]["error"]), None
            field = told.partition(":")[0]
            param = param or (field if field.isidentifier() else None)
        elif param is None:
            told = "a body of a JSON object is needed, with Content-Type: application/json"
            code = None
        else:
            told, code = f"{param}: {first['msg']}", None
        return JSONResponse(make_error(told, "invalid_request_error", param, code), 400)

    @app.exception_handler(HTTPException)
    async def http_error(http: Request, error: HTTPException) -> Response:
        return JSONResponse(
            make_error(str(error.detail), "invalid_request_error"), error.status_code, error.headers
        )

    @app.exception_handler(Exception)
    async def answer_error(http: Request, error: Exception) -> Response:
        return make_error_response(error)

    for kind in (ValueError, TypeError, BadRequest):
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(CacheError, answer_error)


def _is_type_name(part: str | int) -> bool:
    """Is this part of a place the name of a type, which was tried there?"""
    return isinstance(part, str) and (part in TYPE_NAMES or "[" in part or part[:1].isupper())


def describe_error(error: BaseException, *, started: bool = False) -> tuple[int, dict[str, Any]]:
    status, kind = find_status(error, started=started)
    param = code = None
    if isinstance(error, BadRequest):
        status, param, code = error.status, error.param, error.code
    elif isinstance(error, ContextError):  # clients cut a conversation when they see this code
        code = "context_length_exceeded"
    told = str(error) if status < 500 or status == 503 else "the request failed"
    return status, make_error(told, kind, param, code)


def make_error_response(error: BaseException, *, started: bool = False) -> Response:
    status, told = describe_error(error, started=started)
    if status >= 500:
        log.error("a request failed: %r", error)
    headers = {"Retry-After": str(error.retry_seconds)} if isinstance(error, ServerBusy) else None
    return JSONResponse(told, status, headers)
