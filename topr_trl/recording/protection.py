"""Protect a recorder against web pages of other sites, DNS rebinding, and clients without the token."""

import asyncio
import base64
import hmac
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from topr_trl.recording.settings import TOKEN_VARIABLE, RecordArguments

_SEND_TOKEN = f"Send the value of {TOKEN_VARIABLE} as the API key, or as the header Authorization: Bearer VALUE."
_OTHER_SITE = (
    "A page of another site sent this request. The recorder only answers its own page. A proxy in front of it must "
    "pass on the header Host."
)
KEY_HEADER = "x-api-key"  # header of Anthropic's clients, instead of `Authorization`
_LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")


def error(status: int, message: str, kind: str = "invalid_request_error") -> web.Response:
    """Return an error in the format of OpenAI's and Anthropic's APIs, so that clients show its message.

    Args:
        status (`int`): HTTP status code.
        message (`str`): Message, with the remedy.
        kind (`str`, *optional*, defaults to `"invalid_request_error"`): Type of the error.
    """
    return web.json_response(error_body(status, message, kind), status=status)


def error_body(status: int, message: str, kind: str) -> dict[str, Any]:
    """Return the JSON of an error in the format of OpenAI's and Anthropic's APIs.

    Args:
        status (`int`): HTTP status code.
        message (`str`): Message, with the remedy.
        kind (`str`): Type of the error.
    """
    return {"type": "error", "error": {"message": message, "type": kind, "param": None, "code": status}}


def protect(args: RecordArguments) -> Middleware:
    """Return a middleware that refuses requests from pages of other sites, and requests without a required token.

    If no token is required, the middleware also refuses requests to unknown host names. It converts the errors of
    aiohttp to the format of OpenAI's API.

    Args:
        args (`RecordArguments`): Settings of the recorder.
    """
    token = args.token

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = _hostname(request.host)
        # Another site can point its host name to this machine (DNS rebinding). A token also stops the requests of that
        # site. If a token is required, any host name is therefore accepted.
        if token is None and host not in {*_LOCAL_NAMES, args.host}:
            remedy = f"Use the address that topr record prints, or set {TOKEN_VARIABLE}, and send it as the API key."
            return error(403, f"The host {host!r} is not this recorder. {remedy}")
        if _is_from_other_site(request):
            return error(403, _OTHER_SITE)
        if token is not None and not _has_token(request, token):
            found = error(401, _SEND_TOKEN, "authentication_error")
            found.headers["WWW-Authenticate"] = 'Basic realm="topr record", charset="UTF-8"'
            return found
        try:
            return await handler(request)
        except web.HTTPException as exception:
            if exception.status == 413:
                return error(413, f"The request is larger than max_body_mb={args.max_body_mb}.")
            hint = ""
            if exception.status in (404, 405):
                hint = f" The base URL of an application ends in /v1: http://{request.host}/v1."
            return error(exception.status, f"{request.method} {request.path}: {exception.reason}.{hint}")

    return middleware


async def read_body(request: web.Request, args: RecordArguments) -> bytes:
    """Return the body of a request.

    Args:
        request (`web.Request`): Request.
        args (`RecordArguments`): Settings of the recorder.

    Raises:
        HTTPRequestTimeout: the request did not arrive within `client_timeout` seconds.
        HTTPBadRequest: the encoding of the body is wrong.
        HTTPRequestEntityTooLarge: the request is larger than `max_body_mb`.
    """
    try:
        async with asyncio.timeout(args.client_timeout):
            return await request.read()
    except TimeoutError:
        reason = f"the request did not arrive within client_timeout={args.client_timeout:g} seconds"
        raise web.HTTPRequestTimeout(reason=reason) from None
    except web.RequestPayloadError:
        reason = "the body does not match Content-Length, Transfer-Encoding or Content-Encoding"
        raise web.HTTPBadRequest(reason=reason) from None


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:  # for instance a "[" without "]"
        return None


def _is_from_other_site(request: web.Request) -> bool:
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        return True
    # Allow navigation, because a person may follow a link from another site to the page.
    is_navigation = request.method == "GET" and request.headers.get("Sec-Fetch-Mode") == "navigate"
    return request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site") and not is_navigation


def _has_token(request: web.Request, token: str) -> bool:
    """Return whether a request has the token. Applications send it as the API key, browsers as the password."""
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    value = value or request.headers.get(KEY_HEADER, "")
    if scheme.lower() == "basic":
        try:
            value = base64.b64decode(value, validate=True).decode().partition(":")[2]
        except ValueError:
            return False
    return hmac.compare_digest(value.strip().encode(errors="surrogateescape"), token.encode())
