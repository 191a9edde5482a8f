"""Error responses in OpenAI's format, for exceptions of routes and of request validation."""

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
    """An invalid request, with the field and the status to report."""

    def __init__(self, message: str, param: str | None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ValidationError)  # a /v1/responses request is converted to a chat
    @app.exception_handler(RequestValidationError)
    async def invalid(http: Request, error: RequestValidationError | ValidationError) -> Response:
        # Of a union, pydantic reports an error for each member: the deepest is the nearest match.
        first = max(error.errors(), key=lambda detail: len(detail["loc"]))
        location = [str(part) for part in first["loc"] if not _is_type_name(part)]
        # A discriminated union repeats the field: groupby drops the second.
        param = ".".join(part for part, _ in groupby(location)) or None
        if first["type"] == "extra_forbidden":
            message, code = f"{param}: not supported", "unsupported_parameter"
        elif first["type"] == "json_invalid":
            message, param, code = f"the body is not JSON: {first['ctx']['error']}", None, None
        elif first["type"] == "value_error":
            message, code = str(first["ctx"]["error"]), None
            field = message.partition(":")[0]
            param = param or (field if field.isidentifier() else None)
        elif param is None:
            message = "the body must be a JSON object, with Content-Type: application/json"
            code = None
        else:
            message, code = f"{param}: {first['msg']}", None
        return JSONResponse(make_error(message, "invalid_request_error", param, code), 400)

    @app.exception_handler(HTTPException)
    async def http_error(http: Request, error: HTTPException) -> Response:
        return JSONResponse(
            make_error(str(error.detail), "invalid_request_error"), error.status_code, error.headers
        )

    @app.exception_handler(Exception)
    async def answer_error(http: Request, error: Exception) -> Response:
        return make_error_response(error)

    for error_class in (ValueError, TypeError, BadRequest):
        app.add_exception_handler(error_class, answer_error)
    app.add_exception_handler(CacheError, answer_error)


def _is_type_name(part: str | int) -> bool:
    """Whether pydantic added this part of an error's location for a member of a union."""
    return isinstance(part, str) and (part in TYPE_NAMES or "[" in part or part[:1].isupper())


def describe_error(error: BaseException, *, started: bool = False) -> tuple[int, dict[str, Any]]:
    """Return the status and body of an error; details of internal errors are not revealed."""
    status, error_type = find_status(error, started=started)
    param = code = None
    if isinstance(error, BadRequest):
        status, param, code = error.status, error.param, error.code
    elif isinstance(error, ContextError):  # clients cut a conversation when they see this code
        code = "context_length_exceeded"
    message = str(error) if status < 500 or status == 503 else "the request failed"
    return status, make_error(message, error_type, param, code)


def make_error_response(error: BaseException, *, started: bool = False) -> Response:
    status, body = describe_error(error, started=started)
    if status >= 500:
        log.error("a request failed: %r", error)
    headers = {"Retry-After": str(error.retry_seconds)} if isinstance(error, ServerBusy) else None
    return JSONResponse(body, status, headers)
