"""Errors in OpenAI's form, with their HTTP status: the one place that knows which error of gRPC has which status."""

from __future__ import annotations

import json
from typing import Any

from specdec.errors import (
    CacheExhausted,
    ConfigError,
    InvalidRequest,
    Mismatch,
    ReplicaUnavailable,
    SpecdecError,
)

CONTEXT_LENGTH = "context_length_exceeded"  # the code by which clients know that a conversation must be shortened
SERVER_ERRORS = 500  # statuses from here on are the server's, and have the type "server_error"


class HttpError(Exception):
    """A refusal or failure. `param`: the field of the request; `code`: one word for programs."""

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = headers or {}

    @property
    def body(self) -> bytes:
        """The error as an object of JSON, in one line."""
        return json.dumps({"error": self.described}, ensure_ascii=False).encode("utf-8", "replace")

    @property
    def described(self) -> dict[str, Any]:
        """What stands in "error"."""
        kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= SERVER_ERRORS else "invalid_request_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}


def too_long(positions_max: int, prompt_count: int, output_count: int, param: str) -> HttpError:
    """The refusal of a prompt and output that do not fit the model, in the words that clients look for."""
    return HttpError(
        400,
        f"This model's maximum context length is {positions_max} tokens. However, you requested "
        f"{prompt_count + output_count} tokens ({prompt_count} in the messages, {output_count} in the completion). "
        "Please reduce the length of the messages or completion.",
        CONTEXT_LENGTH,
        param,
    )


def param_of(field: str, prompt_param: str) -> str:
    """Returns the field of HTTP for one of gRPC, such as `top_p` for `sampling.top_p`."""
    message, _, name = field.partition(".")
    if message == "prompt":
        return prompt_param
    return name.partition("[")[0] if message == "sampling" else field


def error_from(error: BaseException, prompt_param: str = "prompt") -> HttpError:
    """Returns the HTTP error for one of specdec; 500 without its words for any other."""
    if isinstance(error, HttpError):
        return error
    sentence = str(error)
    if isinstance(error, InvalidRequest):
        param = param_of(error.field, prompt_param)
        is_long = "positions" in error.limit or (error.field == "prompt.text" and error.limit.endswith("bytes"))
        return HttpError(400, sentence, CONTEXT_LENGTH if is_long else "invalid_value", param)
    if isinstance(error, CacheExhausted):
        return HttpError(503, sentence, "overloaded", headers=retry_headers(error.retry_after_s))
    if isinstance(error, TimeoutError):
        return HttpError(504, "the request took longer than this server allows", "request_timeout")
    if isinstance(error, ReplicaUnavailable):
        return HttpError(503, sentence, "target_unavailable", headers=retry_headers(error.retry_after_s))
    if isinstance(error, Mismatch):
        return HttpError(503, sentence, "target_unavailable")
    if isinstance(error, ConfigError):
        return HttpError(400, sentence, "invalid_value", prompt_param)
    if isinstance(error, SpecdecError):
        return HttpError(500, sentence, error.reason.lower())
    return HttpError(500, "the gateway failed; its log says more", "internal_error")


def retry_headers(retry_after_s: Any) -> dict[str, str]:
    """The header that says when to come again: whole seconds, at least 1."""
    return {"retry-after": str(max(1, round(float(retry_after_s or 1.0))))}
