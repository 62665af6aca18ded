"""Which key a command sends, and what to do when the server wants another."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from ts_frontend.addresses import is_loopback
from ts_frontend.authorization.key_file import NAME
from ts_frontend.authorization.keys import BadKeys, Keys, Kind, time_text
from ts_frontend.authorization.sources import read_keys


class NoKeys(Exception):
    """The file that was named can't be used; the message says why."""


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """`token` is sent whatever is called; else the key that `file` has for it."""

    token: str | None = None
    keys: Keys | None = None
    file: Path | None = None

    def metadata(self, kind: Kind) -> tuple[tuple[str, str], ...]:
        """What goes with a call of that kind: nothing without a key."""
        text = self.token
        if text is None and self.keys and self.keys.get(kind):
            text = self.keys[kind][0].secret.decode("ascii")
        return (("authorization", f"Bearer {text}"),) if text else ()

    def advice(self, kind: Kind, now_s: float | None = None) -> str:
        """For somebody whose call was refused: what was sent, and where a good key may be had."""
        return (
            f"The server asks for its {kind.value} key; {self._sent(kind, time.time() if now_s is None else now_s)}.\n"
            f"The server's keys are in {NAME} in the directory in which it was started: run the command there, or say\n"
            "where the file is with --key-file. Or give the key: --token, or TORCHSERVE_TOKEN in the environment.\n"
            f"A new key, when the old one has expired: curl -H 'Authorization: Bearer API_KEY' "
            f"'http://HOST:8081/token?type={kind.value}'"
        )

    def _sent(self, kind: Kind, now_s: float) -> str:
        if self.token is not None:
            return "the one of --token (or TORCHSERVE_TOKEN) isn't that"
        if self.keys is None or self.file is None:
            return "none was sent"
        if not self.keys.get(kind):
            return f"{self.file} has none, and none was sent"
        expires_s = self.keys[kind][0].expires_s
        if expires_s <= now_s:
            return f"the one of {self.file} has expired, at {time_text(expires_s)}"
        return f"the one of {self.file} isn't that"


def find_keys(token: str | None, file: Path | None, host: str) -> ClientKeys:
    """The keys for a server at `host`. A key_file.json that wasn't named counts where the server is on this machine:
    another's has no business with its keys.

    :raises NoKeys: `token` can't be a key; `file` was named and holds none.
    """
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise NoKeys("--token (or TORCHSERVE_TOKEN): a key has printable ASCII characters and no blanks")
    if token:
        return ClientKeys(token)
    found = file or Path(NAME).absolute()
    if file is None and not (is_loopback(host) and found.is_file()):
        return ClientKeys()
    try:
        return ClientKeys(None, read_keys(found), found)
    except BadKeys as error:
        if file is None:
            return ClientKeys()
        raise NoKeys(str(error)) from None
