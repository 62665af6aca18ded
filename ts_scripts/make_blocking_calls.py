"""Writes the calls of the blocking client from those of the client for asyncio: the same calls, not awaited.

python ts_scripts/make_blocking_calls.py          # rewrites the part in frontend/torchrelay_client/client.py
"""

from __future__ import annotations

import re
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "frontend/torchrelay_client"
BEGIN = "    # --- the Open Inference Protocol"
END = "    # --- how they are made"
#: What the blocking form has in place of the other, in this order.
WORDS = (("async def ", "def "), ("await ", ""), ("AsyncAnswers", "Answers"))


def part(text: str) -> str:
    """The calls in a client's source. Raises ValueError."""
    return text[text.index(BEGIN) : text.index(END)]


def blocking(calls: str) -> str:
    for word, other in WORDS:
        calls = re.sub(rf"\b{word}", other, calls)
    return calls


def made() -> str:
    """The blocking client's source, with its calls as they must be."""
    text = (CLIENT / "client.py").read_text()
    return text.replace(part(text), blocking(part((CLIENT / "aio.py").read_text())))


if __name__ == "__main__":
    (CLIENT / "client.py").write_text(made())
