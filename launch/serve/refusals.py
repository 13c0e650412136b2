"""What clients hear that are not answered: one form of error for all, which is that of OpenAI's interface."""

from collections.abc import Mapping

import fastapi
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from calm_beam.errors import CalmBeamError

_FIRST_STATUS_OF_OURS = 500


class RefusedError(HTTPException, CalmBeamError):
    """A request that is not answered, for a reason that has a name."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """Keeps the reason.

        Args:
          status: Of HTTP.
          message: In words.
          param: What of the request is wrong.
          code: The reason's name, for programs.
          retry_after: Seconds after which to come again, where that may help.
        """
        super().__init__(status, message, headers=None if retry_after is None else {"Retry-After": str(retry_after)})
        self.param = param
        self.code = code


def add_refusals(app: fastapi.FastAPI) -> None:
    """Has an app say what is wrong with a request, always in one form."""

    @app.exception_handler(HTTPException)
    async def refused(_: fastapi.Request, error: HTTPException) -> fastapi.Response:
        return refusal(error, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def not_valid(_: fastapi.Request, error: RequestValidationError) -> fastapi.Response:
        found = "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
        names = [str(name) for part in error.errors() for name in part["loc"][1:2] if isinstance(name, str)]
        return refusal(RefusedError(400, found, param=next(iter(names), None)))


def error_fields(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """Returns the body of an error."""
    kind = "invalid_request_error" if status < _FIRST_STATUS_OF_OURS else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class BoundedBodies:
    """Refuses bodies that are too long, or of a length that is not told, before they are read."""

    def __init__(self, app: ASGIApp, *, most_bytes: int) -> None:
        """Stands before an app."""
        self._app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what is not refused."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            error = None
            if b"transfer-encoding" in headers:
                error = HTTPException(411, "Content-Length is missing")
            elif int(headers.get(b"content-length", b"0")) > self._most_bytes:
                error = HTTPException(413, f"the body is longer than {self._most_bytes} bytes")
            if error is not None:
                await refusal(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def refusal(error: HTTPException, *, headers: Mapping[str, str] | None = None) -> fastapi.Response:
    """Returns the response to a request that is not answered."""
    # What was asked may hold halves of surrogate pairs, which no answer can hold.
    message = str(error.detail).encode(errors="backslashreplace").decode()
    param, code = (error.param, error.code) if isinstance(error, RefusedError) else (None, None)
    fields = error_fields(error.status_code, message, param=param, code=code)
    return fastapi.responses.JSONResponse(fields, error.status_code, headers=dict(headers or {}))
