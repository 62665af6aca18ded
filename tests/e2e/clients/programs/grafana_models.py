"""Reads dashboards with the models that Grafana publishes, and prints each member that they do not have or change.

Usage: python grafana_models.py DASHBOARD.json...
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard


def differences(ours: Any, read: Any, place: str) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(read, dict):
        for name, value in ours.items():
            if name in read:
                yield from differences(value, read[name], f"{place}.{name}")
            else:
                yield f"{place}.{name}"
    elif isinstance(ours, list) and isinstance(read, list) and len(ours) == len(read):
        for index, (one, other) in enumerate(zip(ours, read, strict=True)):
            yield from differences(one, other, f"{place}[{index}]")
    elif ours != read:
        yield f"{place}: {ours!r} is read as {read!r}"


def main() -> None:
    register_default_plugins()
    for path in map(Path, sys.argv[1:]):
        ours = json.loads(path.read_text())
        read = json.loads(json.dumps(Dashboard.from_json(ours), cls=JSONEncoder))
        for difference in differences(ours, read, path.name):
            print(difference)


if __name__ == "__main__":
    main()
