"""SageMaker's sessions: their begin, end and expiry."""

from __future__ import annotations

import pytest

from support import Clock
from ts_frontend.errors import InvalidArgument
from ts_frontend.http import platforms
from ts_frontend.http.platforms import Sessions, SessionsFull, _session_call


def begun(sessions: Sessions) -> str:
    name, value = sessions.begin().headers[1]
    assert name == b"x-amzn-sagemaker-new-session-id"
    return value.decode().partition("; Expires=")[0]


def test_a_session_ends_after_its_time_or_when_it_is_closed() -> None:
    clock = Clock()
    sessions = Sessions(60, clock)
    one, other = begun(sessions), begun(sessions)
    sessions.check(one)
    assert sessions.close(other).headers[1] == (b"x-amzn-sagemaker-closed-session-id", other.encode())
    clock.now_s += 60
    for gone in (one, other, "", "x" * 1000):
        with pytest.raises(InvalidArgument, match="session not found") as error:
            sessions.check(gone)
        assert len(error.value.message) < 200


def test_their_number_is_limited_and_ended_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "SESSIONS_MAX", 3)
    clock = Clock()
    sessions = Sessions(60, clock)
    for _ in range(3):
        begun(sessions)
    with pytest.raises(SessionsFull):
        sessions.begin()
    clock.now_s += 61
    begun(sessions)


@pytest.mark.parametrize(
    ("body", "call"),
    [
        (b'{"requestType": "NEW_SESSION"}', "NEW_SESSION"),
        (b' {"requestType":"CLOSE"} ', "CLOSE"),
        (b'{"requestType": "CLOSE", "more": 1}', ""),
        (b'["requestType"]', ""),
        (b'{"requestType"', ""),
        (b'{"requestType": "\xff"}', ""),
        (b'{"requestType": "NEW_SESSION"}' + b" " * 300, ""),
        (b"[1, 2]", ""),
    ],
)
def test_only_a_body_with_nothing_else_is_a_call(body: bytes, call: str) -> None:
    assert _session_call(body) == call
