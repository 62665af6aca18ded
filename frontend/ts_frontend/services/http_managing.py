"""What the doors of models and of workflows have in common on the HTTP management listener."""

from __future__ import annotations

import json

from ts_frontend.errors import InvalidArgument
from ts_frontend.ingress.http import MethodNotAllowed
from ts_frontend.ingress.http_call import HttpAnswer, HttpRequest, Serve
from ts_frontend.services.actions import LIST_LIMIT, Outcome
from ts_frontend.services.http_answers import Parameters, json_answer, query_pairs


def admitted(serve: Serve | None, switched_off: tuple[Serve, ...]) -> Serve | None:
    """Who serves a request. Raises MethodNotAllowed for what is switched off."""
    if serve is not None and serve in switched_off:
        raise MethodNotAllowed
    return serve


def outcome_answer(outcome: Outcome) -> HttpAnswer:
    return json_answer(outcome.http_status, {"status": outcome.status})


def page_asked(parameters: Parameters) -> tuple[int, int]:
    """`limit` and `next_page_token`."""
    return _integer_or(parameters, "limit", LIST_LIMIT), _integer_or(parameters, "next_page_token", 0)


def _integer_or(parameters: Parameters, name: str, default: int) -> int:
    """Paging forgives what isn't a number, as TorchServe does."""
    try:
        value = parameters.integer(name)
    except InvalidArgument:
        return default
    return default if value is None else value


async def register_parameters(request: HttpRequest) -> Parameters:
    """Those of the query, or of a JSON body."""
    if request.header(b"content-type").partition(";")[0].strip().lower() == "application/json":
        return _json_parameters(await request.body())
    return Parameters(query_pairs(request))


def _json_parameters(body: bytes) -> Parameters:
    """The members of a JSON object, as parameters of those names."""
    try:
        members = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"The request's body is not JSON: {error}") from None
    if not isinstance(members, dict):
        raise InvalidArgument(f"The request's body must be a JSON object, not {type(members).__name__}")
    return Parameters([(name, _text(name, value)) for name, value in members.items() if value is not None])


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, str) and value.isprintable()):
        return str(value)
    raise InvalidArgument(f"Parameter {name} must be a text, a whole number, true or false")
