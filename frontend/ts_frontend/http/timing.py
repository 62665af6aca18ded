"""Where the time of an HTTP request went, told to a client that asked: in the header Server-Timing, of a stream in a
trailer of that name, too."""

from __future__ import annotations

from typing import Any

from ts_frontend.http.request import STREAMED, Event, Header, Scope, Send
from ts_frontend.telemetry.timing import ANSWER, ASK, RequestTimes

ASKS: Header = (ASK.encode(), b"1")
_ANSWER = ANSWER.encode()
_TRAILERS = "http.response.trailers"


def telling(send: Send, times: RequestTimes, scope: Scope) -> Send:
    """Wraps `send` for one answer. The header of a stream has what is known at its first piece, the trailer all of it;
    engines and clients of HTTP without trailers get the header alone."""
    can_trail = _TRAILERS in (scope.get("extensions") or {})
    trails = False

    async def tell(event: Event) -> None:
        nonlocal trails
        kind = event["type"]
        if kind == "http.response.start":
            trails = can_trail and STREAMED in event["headers"]
            more = [(_ANSWER, times.text().encode())]
            if trails:
                more.append((b"trailer", _ANSWER))
            event = {**event, "headers": [*event["headers"], *more], **_with_trailers(trails)}
        await send(event)
        if trails and kind == "http.response.body" and not event.get("more_body"):
            headers = [(_ANSWER, times.text().encode())]
            await send({"type": _TRAILERS, "headers": headers, "more_trailers": False})

    return tell


def _with_trailers(trails: bool) -> dict[str, Any]:
    return {"trailers": True} if trails else {}
