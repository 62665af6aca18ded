"""Reading what an archive says of itself: every value is checked, the errors name archive and file.

`path` is the archive (its name in errors), `file` a file of it. Everything raises InvalidArchive.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ts_frontend.models.extraction import refusal, safe_parts

_TEXT_BYTES_MAX = 1 << 20


def read_manifest(path: Path, file: Path) -> dict[str, Any]:
    """The JSON object in `file`, {} when it isn't there."""
    content = read_text(path, file)
    if content is None:
        return {}
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"not JSON: {error}", f"{file.parent.name}/{file.name}") from error
    if not isinstance(manifest, dict):
        raise refusal(path, "must be a JSON object", f"{file.parent.name}/{file.name}")
    return manifest


def read_text(path: Path, file: Path) -> str | None:
    """A small text file (UTF-8, byte order mark allowed), None if it isn't there."""
    try:
        with file.open("rb") as source:
            data = source.read(_TEXT_BYTES_MAX + 1)
        if len(data) > _TEXT_BYTES_MAX:
            raise refusal(path, f"larger than {_TEXT_BYTES_MAX} bytes", file.name)
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise refusal(path, f"not UTF-8: {error}", file.name) from error
    except OSError as error:
        raise refusal(path, f"can't be read: {error.strerror}", file.name) from error


def member(path: Path, manifest: dict[str, Any], key: str, file: Path) -> dict[str, Any]:
    value = manifest.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refusal(path, f"{key!r} must be an object, not {value!r}", str(file))
    return value


def text(path: Path, values: dict[str, Any], key: str, file: Path) -> str | None:
    """A text of the manifest; absent, null and "" are None."""
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise refusal(path, f"{key!r} must be a text, not {value!r}", str(file))
    return value or None


def file_name(path: Path, values: dict[str, Any], key: str, file: Path) -> str | None:
    """A file the manifest names: it must lie inside the archive. A missing one is the handler's business."""
    name = text(path, values, key, file)
    return "/".join(safe_parts(path, name)) or None if name else None
