"""The HTTP server below the front: what it says of itself, and to what is no request at all."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

SERVER: Final = "flare"
"""The Server header: no library and no version that somebody could look up the holes of."""
MAX_LINE: Final = 8190
"""Bytes of a request's path."""
MAX_FIELD: Final = 16 * 1024
"""Bytes of one header; another number than MAX_LINE, which tells what was too long."""


def refusal(status: int, code: str, message: str, **headers: str) -> web.Response:
    """Return an answer that says why there is no other, in the form that OpenAI's clients read.

    Args:
        status: the HTTP status.
        code: one word for programs.
        message: a sentence for people.
        headers: more headers.
    """
    body = json.dumps({"error": {"message": message, "type": code, "code": status}})
    named = {"Server": SERVER, **headers}
    return web.Response(status=status, text=body, content_type="application/json", headers=named)


class HttpServer(web.Server):
    """An HTTP server of one handler; whatever goes wrong is answered as `refusal` does."""

    def __call__(self) -> web.RequestHandler:
        """Return what takes one connection."""
        return _Connection(
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type] # none, which aiohttp's own annotation does not know
            max_line_size=MAX_LINE,
            max_field_size=MAX_FIELD,
            auto_decompress=False,
        )


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no request that can be read, or what the handler failed at."""
        if status >= 500:
            self.log_exception("Answering %s failed", request.rel_url.path, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun; the cut connection says that it is not whole")
        if not isinstance(exc, LineTooLong):
            answer = (
                refusal(
                    500, "internal_error", "The front failed at this request; its rank's output says how."
                )
                if status >= 500
                else refusal(400, "bad_request", "This is no HTTP/1.1 request that can be read here.")
            )
        elif str(exc.args[1]) == str(MAX_LINE):
            answer = refusal(404, "not_found", "There is no such path here: none is that long.")
        else:
            answer = refusal(431, "header_too_large", f"A header has at most {MAX_FIELD} bytes.")
        answer.force_close()
        return answer

    def log_exception(self, *words: Any, **options: Any) -> None:
        """Print what was our fault; what a client sent is its own, and could fill a rank's output."""
        theirs = web.RequestPayloadError | HttpProcessingError | ConnectionError  # the last: it left
        if not isinstance(options.get("exc_info"), theirs):
            super().log_exception(*words, **options)
