"""Errors of the server, and their responses in the format of the API that was called."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import groupby
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from kvant.errors import CacheError, CapacityError, ContextError, EngineError, GrammarError

log = logging.getLogger("kvant")

CONTEXT_EXCEEDED = "context_length_exceeded"
MESSAGES_PATH, OLLAMA_PATH = "/v1/messages", "/api/"
MESSAGES_TYPES = {  # of Anthropic's errors, by status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
TYPE_NAMES = ("body", "str", "int", "bool", "float", "list")


class ServerClosing(CacheError):
    """The server is shutting down."""


class ServerBusy(CacheError):
    """A queue is full; clients should retry after `retry_seconds`."""

    def __init__(self, retry_seconds: int, subject: str = "requests") -> None:
        super().__init__(f"too many {subject} are waiting: retry in {retry_seconds} s")
        self.retry_seconds = retry_seconds


class BadRequest(ValueError):
    """An invalid request, with the field and the status to report."""

    def __init__(self, message: str, param: str | None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RecursionError)
    async def too_deep(http: Request, error: RecursionError) -> Response:
        message = "the body is nested too deeply"
        return respond(http, 400, make_error(message, "invalid_request_error"))

    @app.exception_handler(ValidationError)  # other APIs' requests are converted to chat requests
    @app.exception_handler(RequestValidationError)
    async def invalid(http: Request, error: RequestValidationError | ValidationError) -> Response:
        # Of a union, pydantic reports an error for each member: the deepest is the nearest match.
        first = max(error.errors(), key=lambda detail: len(detail["loc"]))
        location = [str(part) for part in first["loc"] if not _is_type_name(part)]
        # A discriminated union repeats the field: groupby drops the second.
        param = ".".join(part for part, _ in groupby(location)) or None
        if first["type"] == "extra_forbidden":
            message, code = f"{param}: the server has no such field", "unsupported_parameter"
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
        return respond(http, 400, make_error(message, "invalid_request_error", param, code))

    @app.exception_handler(HTTPException)
    async def http_error(http: Request, error: HTTPException) -> Response:
        body = make_error(str(error.detail), "invalid_request_error")
        return respond(http, error.status_code, body, error.headers)

    @app.exception_handler(ValueError)
    @app.exception_handler(TypeError)
    @app.exception_handler(CacheError)
    @app.exception_handler(Exception)
    async def answer_error(http: Request, error: Exception) -> Response:
        return make_error_response(http, error)


def _is_type_name(part: str | int) -> bool:
    """Whether pydantic added this part of an error's location for a member of a union."""
    return isinstance(part, str) and (part in TYPE_NAMES or "[" in part or part[:1].isupper())


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorBody


class OllamaError(BaseModel):
    """An error in Ollama's shape."""

    error: str


class MessagesErrorBody(BaseModel):
    type: str
    message: str


class MessagesError(BaseModel):
    """An error in Anthropic's shape."""

    type: Literal["error"] = "error"
    error: MessagesErrorBody

    @classmethod
    def convert(cls, status: int, body: Mapping[str, Any]) -> MessagesError:
        """Convert an error in OpenAI's shape."""
        error = body["error"]
        message = error["message"]
        if error["code"] == CONTEXT_EXCEEDED:  # clients shorten a conversation when they read this
            message = f"prompt is too long: {message}"
        name = MESSAGES_TYPES.get(status, "api_error" if status >= 500 else error["type"])
        return cls(error=MessagesErrorBody(type=name, message=message))


def make_error(
    message: str, error_type: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Make the body of an error response."""
    error = ErrorBody(message=message, type=error_type, param=param, code=code)
    return ErrorResponse(error=error).model_dump()


def describe_error(error: BaseException, *, started: bool = False) -> tuple[int, dict[str, Any]]:
    """Return the status and body of an error; details of internal errors are not revealed.

    Before generation starts, an error is the client's (400). Later it is the server's (500), except
    for a grammar that grows too large during generation.
    """
    status, error_type, param, code = 500, "server_error", None, None
    if isinstance(error, ServerBusy):
        status, error_type = 429, "rate_limit_error"
    elif isinstance(error, ServerClosing | EngineError):
        status = 503
    elif isinstance(error, GrammarError) or (
        isinstance(error, CapacityError | ValueError | TypeError) and not started
    ):
        status, error_type = 400, "invalid_request_error"
    if isinstance(error, BadRequest):
        status, param, code = error.status, error.param, error.code
    elif isinstance(error, ContextError):  # clients cut a conversation when they see this code
        code = CONTEXT_EXCEEDED
    message = str(error) if status < 500 or status == 503 else "the request failed"
    return status, make_error(message, error_type, param, code)


def make_error_response(http: Request, error: BaseException, *, started: bool = False) -> Response:
    status, body = describe_error(error, started=started)
    if status >= 500:
        log.error("a request failed: %r", error)
    headers = {"Retry-After": str(error.retry_seconds)} if isinstance(error, ServerBusy) else None
    return respond(http, status, body, headers)


def respond(
    http: Request, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    """Respond with an error in the shape of the API whose path was called."""
    return JSONResponse(shape_error(http.url.path, status, body), status, headers)


def shape_error(path: str, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an error in OpenAI's shape to that of the API of a path."""
    if path.startswith(MESSAGES_PATH):
        return MessagesError.convert(status, body).model_dump()
    if path.startswith(OLLAMA_PATH):
        return OllamaError(error=body["error"]["message"]).model_dump()
    return dict(body)
