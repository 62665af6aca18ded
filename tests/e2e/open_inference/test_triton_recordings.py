"""The calls that were recorded with Triton 2.51.0, made again: the same codes, values and JSON.

Intended differences are in tests/data/triton/deviations.json, by reason; values that differ from run to run are masked.
tests/data/triton/README.md describes the recording.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import module_of

DATA = Path(__file__).parents[2] / "data" / "triton"
#: In this order: later ones count on what is loaded, and count requests.
AREAS = [
    *("health", "metadata", "statistics", "infer_grpc", "bad_grpc", "sequences", "streams", "infer_http", "bad_http"),
    *("generate", "shared_memory", "settings", "repository"),
]
#: Texts of errors are each server's own; times differ from run to run.
TEXTS, TIMES = frozenset({"error", "error_message", "reason"}), frozenset({"ns", "last_inference"})
#: That of its workers; Triton's Python backend tells none.
MEMORY = "memory_usage"
#: What Triton says of a body that it can't read, with status 500.
UNREADABLE = ("failed to parse", "Unable to parse", "attempt to ", "failed to get request params")
_RAW = {"bool": "?", "fp32": "f", "fp64": "d", "int64": "q", "uint64": "Q"}
_WIDTHS = {"8": "b", "16": "h", "32": "i"}

Exchange = dict[str, Any]
Answer = dict[str, Any]


exchanges: Any = module_of(Path(__file__).parents[3] / "ts_scripts" / "exchanges.py")
RECORDED: dict[str, list[Exchange]] = {area: exchanges.read(DATA / f"{area}.json") for area in AREAS}
NAMES = [(area, exchange["name"]) for area in AREAS for exchange in RECORDED[area]]
REASONS: list[dict[str, Any]] = json.loads((DATA / "deviations.json").read_text())
DEVIATIONS: dict[tuple[str, str], Answer] = {
    (area, name): ours for reason in REASONS for area, names in reason["calls"].items() for name, ours in names.items()
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any]) -> Iterator[dict[Any, Answer]]:
    """Every call, made once and in order."""
    directory = tmp_path_factory.mktemp("triton")
    shutil.copytree(DATA / "models", directory / "models")
    arguments = ["--ncs", "--model-repository", str(directory / "models")]
    arguments += ["--model-control-mode", "explicit", "--load-model", "*"]
    # Some calls were recorded with `Host: x`.
    with serving(directory, None, {"shared_memory_keys": "/exchanges_.*", "allowed_hosts": "x"}, arguments) as server:
        player = exchanges.Player(server.http.removeprefix("http://"), server.inference)
        try:
            yield {(area, exchange["name"]): player.play(exchange) for area in AREAS for exchange in RECORDED[area]}
        finally:
            player.close()


# --- what counts of an answer


def comparable(answer: Answer) -> Answer:
    found: Answer = _masked(answer)
    message = found.get("message") or {}
    for one in (message, *(part.get("infer_response", {}) for part in found.get("messages", ()))):
        _as_raw(one)
    if "messages" in found:  # those of several requests may be interleaved
        found["messages"].sort(key=lambda part: _request_of(part.get("infer_response", {})))
    if _is_error(found) and "headers" in found:
        own = ("content-type", "allow")  # Allow belongs to status 405 (RFC 9110), Triton sends none
        found["headers"] = {name: value for name, value in found["headers"].items() if name not in own}
    return found


def _request_of(response: dict[str, Any]) -> tuple[str, str]:
    """The request that a streamed response answers: of requests without ids, its model tells."""
    return response.get("id", ""), response.get("model_name", "")


def _masked(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _masked(one, name) for name, one in value.items() if name != MEMORY and (one or name != "reason")}
    if isinstance(value, list):
        return [_masked(one) for one in value]
    if key in TEXTS:
        return True
    return type(value).__name__ if key in TIMES else value


def _is_error(answer: Answer) -> bool:
    return isinstance(answer.get("json"), dict) and "error" in answer["json"]


def _as_raw(message: dict[str, Any]) -> None:
    """Typed outputs, which requests with typed inputs get here, as the raw ones that Triton sends."""
    typed = [output.pop("contents") for output in message.get("outputs", ()) if "contents" in output]
    if typed:
        pairs = zip(message["outputs"], typed, strict=True)
        message["raw_output_contents"] = [_raw(output["datatype"], contents) for output, contents in pairs]


def _raw(datatype: str, contents: dict[str, list[Any]]) -> str:
    ((field, values),) = contents.items()
    kind = field.removesuffix("_contents")
    if kind == "bytes":
        texts = [base64.b64decode(value) for value in values]
        return base64.b64encode(b"".join(struct.pack("<I", len(text)) + text for text in texts)).decode()
    code = _RAW.get(kind) or _WIDTHS[datatype.lstrip("UINT")]
    code = code.upper() if datatype.startswith("UINT") else code
    numbers = [int(value) if isinstance(value, str) else value for value in values]
    return base64.b64encode(struct.pack(f"<{len(values)}{code}", *numbers)).decode()


# --- what is expected


def expected(area: str, exchange: Exchange) -> tuple[Answer, bool]:
    """The recorded answer with this server's differences, and whether it is complete."""
    theirs = comparable(exchange["answer"])
    ours = DEVIATIONS.get((area, exchange["name"]))
    if ours is not None:
        partly = any(key in ours for key in ("code", "status", "statuses"))
        return (ours, False) if partly else (_changed(theirs, ours), True)
    text = str(exchange["answer"]["json"]["error"]) if _is_error(theirs) else ""
    if theirs.get("status") == 500 and text.startswith(UNREADABLE):
        return {"status": 400, "json": {"error": True}}, False
    if theirs.get("status") == 200 and theirs.get("text") == "" and "HEAD" not in exchange["http"]:
        return {"status": 200}, False  # KServe's clients read JSON there
    return theirs, True


def _changed(value: Any, change: Any) -> Any:
    """The answer with the differences of `change`, which has the same keys and indices; None removes a value."""
    if not isinstance(change, dict):
        return change
    if isinstance(value, list):
        return [_changed(one, change[str(at)]) if str(at) in change else one for at, one in enumerate(value)]
    found = dict(value) if isinstance(value, dict) else {}
    for key, one in change.items():
        if one is None:
            found.pop(key)
        else:
            found[key] = _changed(found.get(key), one)
    return found


def has(made: Any, wanted: Any) -> bool:
    """Whether all of `wanted` is in `made`; dicts may have more."""
    if isinstance(made, dict) and isinstance(wanted, dict):
        return all(key in made and has(made[key], one) for key, one in wanted.items())
    return bool(made == wanted)


def differs(area: str, exchange: Exchange, answer: Answer) -> bool:
    """Whether an answer differs from the one that is expected here."""
    wanted, whole = expected(area, exchange)
    made = comparable(answer)
    return made != wanted if whole else not has(made, wanted)


@pytest.mark.parametrize("area", AREAS)
def test_the_answers_are_those_of_triton(played: dict[Any, Answer], area: str) -> None:
    answers = [(exchange, played[area, exchange["name"]]) for exchange in RECORDED[area]]
    wrong = {
        exchange["name"]: f"{answer}, not {expected(area, exchange)}"
        for exchange, answer in answers
        if differs(area, exchange, answer)
    }
    assert answers and not wrong, wrong


def test_deviations_are_of_calls_that_are_there_and_have_reasons() -> None:
    assert DEVIATIONS.keys() <= set(NAMES)
    assert len(DEVIATIONS) == sum(len(names) for reason in REASONS for names in reason["calls"].values())
    assert all(reason["reason"] for reason in REASONS)


def test_what_is_called_a_deviation_is_one() -> None:
    for area in AREAS:
        named = [one for one in RECORDED[area] if (area, one["name"]) in DEVIATIONS]
        assert [one["name"] for one in named if not differs(area, one, one["answer"])] == []
