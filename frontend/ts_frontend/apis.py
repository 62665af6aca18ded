"""What answers at an HTTP address: the APIs of one listener, together and for those who have their keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ts_frontend.addresses import Address
from ts_frontend.authorization.keys import Kind
from ts_frontend.ingress.http_call import Route
from ts_frontend.services.http_description import Operation
from ts_frontend.services.http_token import HttpGuard


class Api(NamedTuple):
    """What answers at an HTTP address, and what its description says of that. `managing` changes what is served: it
    needs a management key, wherever it is."""

    address: Address
    operations: Sequence[Operation]
    routes: Sequence[Route]
    managing: Sequence[Route] = ()


def sharing(apis: Mapping[str, Api]) -> dict[tuple[str, ...], Api]:
    """Listeners by the names of the APIs that share them: those of one address do, unless each takes a free port."""
    found: dict[tuple[str, ...], Api] = {}
    for name, api in apis.items():
        address = api.address
        names = next(
            (names for names, one in found.items() if one.address == address and (address.port or address.path)), ()
        )
        together = found.pop(names, Api(address, (), ()))
        found[(*names, name)] = Api(
            address,
            (*together.operations, *api.operations),
            (*together.routes, *api.routes),
            (*together.managing, *api.managing),
        )
    return found


def asking_for_keys(
    apis: Mapping[str, Api], guard: HttpGuard, kinds: Mapping[str, Kind], renewing: str
) -> dict[str, Api]:
    """The same, each API for those who have its key, and with the call that makes new keys; metrics are everyone's."""
    found = {}
    for name, api in apis.items():
        asking = [guard.guarded(route, kinds[name]) for route in api.routes] if name in kinds else api.routes
        managing = [guard.guarded(route, Kind.MANAGEMENT) for route in api.managing]
        routes = (*asking, guard.token_route) if name == renewing else tuple(asking)
        found[name] = api._replace(routes=routes, managing=managing)
    return found
