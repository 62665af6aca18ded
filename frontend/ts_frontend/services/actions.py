"""What the doors of the management API ask of those who manage models."""

from __future__ import annotations

from typing import Any, Protocol

LIST_LIMIT = 100
#: The `timeout` that stands for none.
UNLIMITED = -1


class Outcome(Protocol):
    """What came of an action; failures are raised."""

    @property
    def http_status(self) -> int: ...
    @property
    def status(self) -> str: ...


class Administration(Protocol):
    """What can be done to models (`ts_frontend.models.administration.Administration`)."""

    async def register(
        self,
        url: str,
        *,
        model_name: str | None,
        handler: str | None,
        runtime: str | None,
        batch_size: int | None,
        max_batch_delay: int | None,
        initial_workers: int | None,
        response_timeout: int | None,
        startup_timeout: int | None,
        synchronous: bool,
        s3_sse_kms: bool,
    ) -> Outcome: ...

    async def scale(
        self,
        name: str,
        *,
        version: str | None,
        min_worker: int,
        max_worker: int | None,
        synchronous: bool,
        timeout: int = UNLIMITED,
    ) -> Outcome: ...

    async def unregister(self, name: str, *, version: str | None) -> Outcome: ...
    async def set_default(self, name: str, version: str) -> Outcome: ...
    def list_models(self, *, limit: int, next_page_token: int) -> dict[str, Any]: ...
    async def describe(self, name: str, *, version: str | None, customized: bool) -> list[dict[str, Any]]: ...
