"""Whose web pages may manage what is served: browsers send requests of any page, to servers on their machine, too."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from ts_frontend.addresses import is_loopback
from ts_frontend.errors import Code, ServeError
from ts_frontend.ingress.http_call import HttpRequest


class ForeignOrigin(ServeError):
    """A page of another origin asks the browser to manage models."""

    code, http_status, type_name = Code.PERMISSION_DENIED, 403, "ForeignOriginException"


@dataclass(frozen=True, slots=True)
class Origins:
    """`allowed`: the one whose pages may manage models and workflows ("*": all), None for none but the server's own.
    `local`: only this machine reaches the server."""

    allowed: str | None = None
    local: bool = False

    def check(self, request: HttpRequest) -> None:
        """Raises ForeignOrigin."""
        origin = request.header(b"origin")
        if not origin or self.allowed in ("*", origin) or self._is_own(origin, request.header(b"host")):
            return
        raise ForeignOrigin(
            f"Pages of {origin[:200]} may not manage models; cors_allowed_origin names the origin that may"
        )

    def _is_own(self, origin: str, host: str) -> bool:
        """The page comes from this server. A foreign one may come from a host whose name was made to mean this machine
        (DNS rebinding): a local server has no other names than those that mean this machine anyway."""
        try:
            page = urlsplit(origin)
        except ValueError:
            return False
        return page.netloc.lower() == host.lower() and (not self.local or is_loopback(page.hostname or ""))
