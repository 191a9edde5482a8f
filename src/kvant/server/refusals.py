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
from kvant.server.replies import refused
from kvant.server.service import status_of
from kvant.server.tokenizing import Busy

log = logging.getLogger("kvant")

KINDS = ("body", "str", "int", "bool", "float", "list")


class Wrong(ValueError):
    """Something a client said, and the field in which it did."""

    def __init__(self, told: str, param: str | None, status: int = 400, code: str | None = None):
        super().__init__(told)
        self.param, self.status, self.code = param, status, code


def refuse(app: FastAPI) -> None:
    @app.exception_handler(ValidationError)  # of a request that becomes another one
    @app.exception_handler(RequestValidationError)
    async def invalid(http: Request, error: RequestValidationError | ValidationError) -> Response:
        first = max(error.errors(), key=lambda one: len(one["loc"]))  # of a choice, the nearest
        place = [str(part) for part in first["loc"] if not _is_kind(part)]
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
        return JSONResponse(refused(told, "invalid_request_error", param, code), 400)

    @app.exception_handler(HTTPException)
    async def http_error(http: Request, error: HTTPException) -> Response:
        return JSONResponse(
            refused(str(error.detail), "invalid_request_error"), error.status_code, error.headers
        )

    @app.exception_handler(Exception)
    async def failed(http: Request, error: Exception) -> Response:
        return answer_to(error)

    for kind in (ValueError, TypeError, Wrong):
        app.add_exception_handler(kind, failed)
    app.add_exception_handler(CacheError, failed)


def _is_kind(part: str | int) -> bool:
    """Is this part of a place the name of a type, which was tried there?"""
    return isinstance(part, str) and (part in KINDS or "[" in part or part[:1].isupper())


def told_of(error: BaseException, *, began: bool = False) -> tuple[int, dict[str, Any]]:
    status, kind = status_of(error, began=began)
    param = code = None
    if isinstance(error, Wrong):
        status, param, code = error.status, error.param, error.code
    elif isinstance(error, ContextError):  # clients cut a conversation when they see this code
        code = "context_length_exceeded"
    told = str(error) if status < 500 or status == 503 else "the request failed"
    return status, refused(told, kind, param, code)


def answer_to(error: BaseException, *, began: bool = False) -> Response:
    status, told = told_of(error, began=began)
    if status >= 500:
        log.error("a request failed: %r", error)
    headers = {"Retry-After": str(error.seconds)} if isinstance(error, Busy) else None
    return JSONResponse(told, status, headers)
