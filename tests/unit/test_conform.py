"""tests/conform.py: its table agrees with the recordings, and it reports answers that differ."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from conform import main
from conformance.asking import shown
from conformance.dialects import (
    PLACES,
    Dialect,
    Promise,
    dialects,
    differences,
    filled,
)

DATA = Path(__file__).parents[1] / "data"
RECORDED = [
    pytest.param(one, id=f"{dialect.name}: {one.name}")
    for dialect in dialects()
    for one in dialect.exchanges
    if one.recorded
]


def recorded(name: str) -> tuple[str, dict[str, Any]]:
    """The call of a recording, in words, and its answer in this tool's form."""
    if name.startswith("golden/"):
        (file,) = (DATA / "golden").glob(f"{name.removeprefix('golden/')}_*.txt")
        return golden(file.read_text())
    path, _, title = name.partition("#")
    (row,) = (one for one in json.loads((DATA / path).read_text()) if one["name"] == title)
    call, answer = row.get("http") or row.get("grpc"), dict(row["answer"])
    if isinstance(call, Mapping):
        call = f"{call['method']} {call['path']}"
    if str(answer.get("headers", {}).get("content-type", "")).startswith("text/event-stream"):
        answer |= shown(answer["text"].encode(), "text/event-stream")
    return call, answer


def golden(text: str) -> tuple[str, dict[str, Any]]:
    comments = [line for line in text.splitlines() if line.startswith("# ")]
    body = "\n".join(line for line in text.splitlines() if not line.startswith("#")).strip()
    if call := re.search(r"-X (\w+) 'http://[^/']+([^']*)'", comments[0]):
        head, _, rest = body.partition("\n\n")
        first, *lines = head.splitlines()
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        answer = {"status": int(first.split()[1]), "headers": headers, **shown(rest.encode(), "")}
        return f"{call[1]} {call[2]}", answer
    if failed := re.match(r"status: (\w+) \(\d+\)\ndetails: (.*)", body):
        return comments[0], {"code": failed[1], "error": ast.literal_eval(failed[2])}
    message: dict[str, Any] = {}
    for key, value in re.findall(r"^(\w+): (.*)$", body.removeprefix("OK\n"), re.MULTILINE):
        one = json.loads(value)
        message[key] = [one] if key == "versions" else one
    return comments[0], {"code": "OK", "message": message}


def values(template: str, call: str) -> dict[str, str]:
    """The values of a template's variables in a recorded call; its query may have more."""
    pattern = re.sub(r"\\\$\\\{(\w+)\\\}", r"(?P<\1>[^/?&:]+)", re.escape(template))
    found = re.fullmatch(f"{pattern}(&.*)?", call)
    assert found, (template, call)
    return found.groupdict()


@pytest.mark.parametrize("exchange", RECORDED)
def test_the_table_says_what_was_recorded(exchange: Promise) -> None:
    call, answer = recorded(exchange.recorded)
    variables: dict[str, Any] = {}
    if "http" in exchange.call:
        variables = values(exchange.call["http"].replace("9.9", "${V}"), call.replace("9.9", "V"))
        variables.pop("V", None)
    elif not call.startswith("#"):
        assert call in (exchange.call["grpc"], exchange.call["grpc"].rpartition("/")[2])
    shown_name = str(answer.get("message", {}).get("name") or answer.get("message", {}).get("model_name") or "")
    shown_name = shown_name or str(_first(answer, "name"))
    for name in ("MODEL", "MISSING"):
        variables.setdefault(name, shown_name)
    assert list(differences(filled(exchange.answer, variables), answer)) == []


def _first(value: Any, key: str) -> Any:
    """The first value of that key anywhere in it."""
    if isinstance(value, Mapping):
        if key in value:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            if (found := _first(one, key)) is not None:
                return found
    return None


@pytest.mark.parametrize("dialect", dialects(), ids=lambda dialect: dialect.name)
def test_each_dialect_begins_with_signs_that_need_nothing(dialect: Dialect) -> None:
    """They tell whether the dialect is there, so that they are asked of any server, and change nothing."""
    signs = [one.sign for one in dialect.exchanges]
    assert signs == sorted(signs, reverse=True) and signs[0]
    for one in dialect.exchanges:
        assert one.place in PLACES and ("http" in one.call) == (not one.place.startswith("grpc"))
        if one.sign:
            assert not one.change
            filled(one.call, {"MISSING": "x"})
        if not one.change and "http" in one.call:
            assert one.call["http"].split()[0] in ("GET", "POST"), "what isn't marked as a change only asks"


@pytest.mark.parametrize(
    ("wanted", "found", "words"),
    [
        ({"status": 200}, {"status": 404}, ["status is 404, not 200"]),
        ({"json": {"a": "<text>"}}, {"json": {"a": 1}}, ["json.a is no text: 1"]),
        ({"json": {"a": "<number>"}}, {"json": {"a": True}}, ["json.a is no number: true"]),
        ({"json": {"a": 1, "b": 2}}, {"json": {}}, ["json.a is missing", "json.b is missing"]),
        ({"json": [{"a": 1}]}, {"json": [{"a": 1}, {"a": 2}]}, ["json[1].a is 2, not 1"]),
        ({"json": [1]}, {"json": {}}, ["json is not a list: {}"]),
        ({"json": [1]}, {"json": []}, []),
        ({"json": {}}, {"text": "x"}, ["json is missing"]),
        ({"code": {"<one of>": ["A", "B"]}}, {"code": "C"}, ["code is C, not A or B"]),
        ({"m": {"<begins>": "no a"}}, {"m": "no a. There is b."}, []),
        ({"m": {"<begins>": "no a"}}, {"m": "no b"}, ["m is no b, which doesn't begin with no a"]),
        ({"m": {"<begins>": "no a"}}, {"m": 1}, ["m is 1, which doesn't begin with no a"]),
        ({"m": {"<json>": {"a": 1}}}, {"m": '{"a": 2}'}, ["m.a is 2, not 1"]),
        ({"m": {"<json>": {"a": 1}}}, {"m": "x"}, ["m is no JSON: x"]),
        ({"headers": {"content-type": "text/plain"}}, {"headers": {"content-type": "text/plain; x"}}, []),
        (
            {"headers": {"content-type": "text/plain"}},
            {"headers": {"content-type": "text/html"}},
            ["headers.content-type is text/html, not text/plain"],
        ),
    ],
)
def test_what_differs_is_told(wanted: Any, found: Any, words: list[str]) -> None:
    assert list(differences(wanted, found)) == words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ftp://x"], "is not a URL such as"),
        (["http://x", "--dialect", "openapi"], "there is no dialect openapi; did you mean openai?"),
        (["http://x", "--input", "/none"], "--input /none: No such file"),
    ],
)
def test_what_cannot_be_asked(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err
