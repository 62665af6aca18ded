"""An async handler class: requests wait for something else beside each other, in one process."""

import asyncio


class Waiting:
    def initialize(self, context):
        self.gates = {}

    async def handle(self, data, context):
        """`wait NAME` waits until a request `open NAME` comes; `stream N` sends N pieces."""
        return [await self.one(bytes(row["data"]).decode(), context) for row in data]

    async def one(self, text, context):
        verb, _, name = text.partition(" ")
        if verb == "fail":
            raise ValueError("boom")
        if verb == "exit":
            raise SystemExit(int(name))
        gate = self.gates.setdefault(name, asyncio.Event())
        if verb == "open":
            gate.set()
            return "opened"
        if verb == "wait":
            try:
                await gate.wait()
            except asyncio.CancelledError:
                self.gates["cancelled"] = gate
                raise
            return "through"
        return "cancelled was seen" if "cancelled" in self.gates else "nothing was cancelled"
