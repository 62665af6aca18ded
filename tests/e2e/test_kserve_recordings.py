"""The calls that were recorded with KServe 0.21.0 (tests/data/kserve), made again: the same codes, and the
content of KServe's answers. Values that are null there may be missing here; error texts are each server's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import module_of

DATA = Path(__file__).parents[1] / "data"
exchanges: Any = module_of(Path(__file__).parents[2] / "ts_scripts" / "exchanges.py")
CALLS: list[dict[str, Any]] = exchanges.read(DATA / "kserve" / "calls.json")
REFUSED = "a request that can't be read, or has other tensors than it says, is 400, INVALID_ARGUMENT"
#: Calls with another status: it, and why.
CODES = {
    "v1 list": (400, REFUSED),
    "v1 no instances": (400, REFUSED),
    "v1 content type text": (200, "a body is read whatever its content type says"),
    "v2 not json": (400, REFUSED),
    "v2 no inputs": (400, REFUSED),
    "v2 shape": (400, REFUSED),
    "v2 no shape": (400, REFUSED),
    "v2 text data": (400, REFUSED),
    "ModelReady missing": ("OK", "a model that isn't there is not ready, as Triton and MAX answer"),
    "infer short": ("INVALID_ARGUMENT", REFUSED),
}
#: Calls with another body.
BODIES = {
    "server": "the server's own name, version and abilities",
    "ServerMetadata": "the server's own name, version and abilities",
    "unknown": "errors of the protocol are {error: text}",
    "infer by GET": "errors of the protocol are {error: text}",
    "v2 binary out": "KServe answers in JSON unless the model made its output binary, which it isn't told to",
    "infer raw": "raw requests are answered raw",
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("kserve")
    (directory / "main.py").write_text((DATA / "programs" / "recorded_sums.txt").read_text())
    with serving(directory, None, {"kserve_mode": "true"}, ["--ncs", "--program", "main.py"]) as server:
        server.wait_for_log("of sums_1.0 is ready")
        player = exchanges.Player(server.http.removeprefix("http://"), server.inference)
        try:
            yield {call["name"]: player.play(call) for call in CALLS}
        finally:
            player.close()


def code(answer: dict[str, Any]) -> Any:
    return answer.get("status") or answer["code"]


def has(made: Any, wanted: Any) -> bool:
    """Whether all of `wanted` is in `made`, except null values and errors' texts."""
    if isinstance(wanted, dict):
        return all(
            one is None or (key in made and (key == "error" or has(made[key], one))) for key, one in wanted.items()
        )
    if isinstance(wanted, list):
        return len(made) == len(wanted) and all(map(has, made, wanted))
    return bool(made == wanted)


def test_the_answers_are_those_of_kserve(played: dict[str, Any]) -> None:
    wrong: dict[str, str] = {}
    for call in CALLS:
        try:
            check(call, played)
        except AssertionError as error:
            wrong[call["name"]] = str(error)
    assert not wrong, wrong


def check(call: dict[str, Any], played: dict[str, Any]) -> None:
    name, theirs = call["name"], call["answer"]
    made = played[name]
    if name in CODES:
        assert code(made) == CODES[name][0] != code(theirs), made
        return
    assert code(made) == code(theirs), made
    body = {key: value for key, value in theirs.items() if key in ("json", "message", "text")}
    assert has(made, body) is (name not in BODIES), (made, json.dumps(body))


def test_deviations_are_of_calls_that_are_there() -> None:
    assert {*CODES, *BODIES} <= {call["name"] for call in CALLS}
