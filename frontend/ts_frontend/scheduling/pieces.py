"""The pieces of a job's answer as they come. A module of its own, since asynchronous generators can't be compiled."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from ts.protocol.frames import Buffer
from ts_frontend.job import Job


async def chunks(job: Job) -> AsyncGenerator[list[Buffer], None]:
    """Yields lists of the answer's pieces that are ready together; at least one list. Raises the ServeError that the
    job ended with.

    Each list taken gives the handler credit for more. Closing the generator early cancels the job.
    """
    sent_any = False
    try:
        while True:
            if job.waits:
                await job.more()
            ready = job.take()
            if not ready:
                break
            sent_any = True
            yield ready
            job.give_credit(ready)
        if not sent_any:
            yield [b""]
    finally:
        job.cancel()


async def resumed(first: list[Buffer], rest: AsyncGenerator[list[Buffer], None]) -> AsyncGenerator[list[Buffer], None]:
    """Yields what `rest` does, after the list that was already taken from it, and closes it."""
    try:
        yield first
        async for pieces in rest:
            yield pieces
    finally:
        await rest.aclose()
