"""The same network, 161 layers deep, but narrow: small enough to build and run in a test, without weights to fetch."""

from __future__ import annotations

from densenet161 import DenseNet161


class DenseNet161StandIn(DenseNet161):
    def __init__(self) -> None:
        super().__init__(growth=2, first=8, classes=10)
