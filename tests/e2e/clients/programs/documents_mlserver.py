"""Runs a block of MLServer's page, repaired as docs/documents.md says: blocks lost their indentation when they were
copied, the root of a data field has another name since pydantic 2, and an `async with` needs a function around it."""

import re
import sys
from pathlib import Path

GRPC, HTTP, FOLDER, NUMBER = sys.argv[1:5]


def repaired(text, *repairs):
    for old, new in repairs:
        assert old in text, f"nothing to repair: {old}"
        text = text.replace(old, new)
    return text


def nested(lines, depths):
    """The lines, each with as many steps of indentation as the first pattern that matches says."""
    for line in lines:
        yield "    " * next((depth for pattern, depth in depths if re.match(pattern, line)), 0) + line


EVENTS = (("with connect_sse", 1), ("for sse", 2), ("response = types", 3), (r"print\(", 3))
STREAM = (
    ("yield ", 1),
    ("async with", 1),
    ("grpc_stub =", 2),
    ("inference_request_stream =", 2),
    ("async for", 2),
    ("response =", 3),
    (r"print\(", 3),
)

text = (Path(FOLDER) / f"{NUMBER}.txt").read_text()
testdata = Path.cwd() / "generate-request.json"
testdata.write_text('{"inputs": [{"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["one two"]}]}')
text = repaired(text, ("../tests/testdata/", f"{Path.cwd()}/"))
if NUMBER in ("2", "3"):
    text = repaired(text, ("http://localhost:8080", HTTP))
else:
    text = repaired(text, ("localhost:8081", GRPC), ("data.__root__", "data.root"))
if NUMBER == "3":
    text = "\n".join(nested(text.splitlines(), EVENTS))
if NUMBER == "5":
    lines = list(nested(text.splitlines(), STREAM))
    at = next(number for number, line in enumerate(lines) if line.startswith("    async with"))
    lines.insert(at, "async def main():")
    text = "\n".join([*lines, "import asyncio", "asyncio.run(main())"])
exec(compile(text, f"mlserver {NUMBER}", "exec"))  # noqa: S102 - the page's
