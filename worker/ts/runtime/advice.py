"""Remedies for common mistakes in handlers: a sentence after the exception's own text."""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ts.protocol.text import text_of

#: The keys of `context.system_properties`.
_PROPERTIES = ("model_dir", "gpu_id", "batch_size", "server_name", "server_version", "limit_max_image_pixels")
_BODIES = ("data", "body")
_CALLED_WRONGLY = re.compile(
    r"^(\w+\.)?(\w+)\(\) (?:takes \d+ positional arguments? but \d+ (?:was|were) given|missing \d+ required positional)"
)
#: The call of each of these: the arguments after `self`.
_SIGNATURES = {"handle": "data, context", "initialize": "context", "__init__": ""}
_NO_GPU = (
    "Torch not compiled with CUDA",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
    "torch.cuda.is_available() is False",
)
#: The most elements of a result that are searched for the one that can't be sent.
_LOOKED_AT_MAX = 10_000
ADVICE_CHARS_MAX = 1000


def safely(advise: Callable[..., str], *arguments: Any) -> str:
    """The advice; "" where it can't be given, since it looks into the values and the folder of a handler."""
    try:
        return text_of(advise(*arguments), ADVICE_CHARS_MAX)
    except BaseException:
        return ""


def of_exception(error: BaseException, inputs: Sequence[str] | None = None) -> str:
    """A sentence, "" for an exception without a known remedy. `inputs`: the names in the request's row, if it has
    one."""
    text = text_of(error)
    if isinstance(error, TypeError) and (found := _CALLED_WRONGLY.match(text)):
        return _of_signature(found[1], found[2])
    if isinstance(error, ImportError) and "relative import" in text:
        return "The files of a model are imported by their own names, without dots: `from utils import f`"
    if isinstance(error, OSError):
        return _of_system(error)
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        return _of_key(error.args[0], inputs)
    if isinstance(error, AttributeError):
        return _of_attribute(text)
    if isinstance(error, EOFError) and "reading a line" in text or type(error).__name__ == "BdbQuit":
        return "A worker has no terminal: `torchserve dev` has one, for input() and breakpoint()"
    return _of_device(text)


def _of_signature(owner: str | None, name: str) -> str:
    arguments = _SIGNATURES.get(name)
    if arguments is None:
        return ""
    own = f"self, {arguments}".rstrip(", ") if owner else arguments
    return f"It is called with ({arguments}): write `def {name}({own})`"


def _of_system(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "A handler opens no port: the server has them, and each worker runs the handler"
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, str):
        return ""
    name = os.path.basename(error.filename)
    if not os.path.isabs(error.filename):
        here = sorted(path.name for path in Path.cwd().iterdir() if not path.name.startswith((".", "__")))
        close = difflib.get_close_matches(name, here, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        return (
            f"The model's folder has {', '.join(here[:10]) or 'no files'}{', …' * (len(here) > 10)}: {meant}"
            f"`torch-model-archiver --extra-files {error.filename}` packs a file"
        )
    if error.filename.startswith(os.getcwd()):
        return f"`torch-model-archiver --extra-files {name}` packs a file with the model"
    return (
        "A model is served from a folder of its own, maybe on another machine: pack the file (torch-model-archiver "
        f"--extra-files) and open os.path.join(context.system_properties['model_dir'], {name!r})"
    )


def _of_key(key: str, inputs: Sequence[str] | None) -> str:
    if inputs is not None and key not in inputs and key in _BODIES:
        other = "body" if key == "data" else "data"
        if list(inputs) == [other]:
            return f"This client's request has it as {other!r}: write row.get('data') or row.get('body')"
        names = ", ".join(map(repr, inputs)) or "none"
        return (
            f"The inputs of this request are {names}: the fields of a form, as `curl -d` and `curl -F` send one. "
            "`curl -T FILE` sends a body, and so does `curl --data-binary @FILE -H 'Content-Type: …'`"
        )
    close = difflib.get_close_matches(key, _PROPERTIES, n=1, cutoff=0.75)
    return f"Did you mean {close[0]!r}?" if close and close[0] != key else ""


def _of_attribute(text: str) -> str:
    if re.match(r"'(str|dict|list)' object has no attribute 'decode'", text) or re.match(
        r"'(bytearray|bytes)' object has no attribute '(encode|get|items|keys|split|format)'", text
    ):
        return (
            "The request's Content-Type decides what an input is: text/… a str, application/json the value, any other "
            "or none a bytearray (docs/handlers.md)"
        )
    return ""


def _of_device(text: str) -> str:
    if any(part in text for part in _NO_GPU):
        return (
            "This worker has no GPU. Take the device from the context, as BaseHandler does: gpu_id = "
            'context.system_properties.get("gpu_id"); device = "cpu" if gpu_id is None else f"cuda:{gpu_id}"; and load '
            "with torch.load(…, map_location=device)"
        )
    if "Expected all tensors to be on the same device" in text:
        return "The inputs of a request are on the CPU: move them to the model's device, with .to(device)"
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the exception is about memory, not another error of a GPU."""
    text = text_of(error)
    return issubclass(type(error), MemoryError) or ("CUDA" in text and not any(one in text for one in _NO_GPU))


# --- results


def of_whole_result(value: Any) -> str:
    """The replacement for a handler's result that is no list, as advice; "" if it isn't known."""
    if value is None:
        return "A path through handle ends without a return"
    if isinstance(value, (str, bytes, bytearray, dict)):
        return "Put the answer into a list: return [answer]"
    if isinstance(value, tuple):
        return "list(x) makes a list of it"
    return "x.tolist() makes a list of it, an element per row" if hasattr(value, "tolist") else ""


def of_result(value: Any) -> str:
    """The place of a value in a handler's answer that JSON can't represent, and its remedy; "" if unknown."""
    found = _odd(value, "", [0])
    if found is None:
        return ""
    odd, where = found
    advice = _as_json(odd)
    if not advice:
        return ""
    return f"{where or 'It'} is {_article(type(odd).__name__)}: {advice}"


def _odd(value: Any, where: str, seen: list[int]) -> tuple[Any, str] | None:
    """The first element that JSON can't represent, and its place."""
    seen[0] += 1
    if seen[0] > _LOOKED_AT_MAX or where.count("[") > 20 or isinstance(value, (str, int, float, type(None))):
        return None
    if isinstance(value, dict):
        inside = [(item, f"{where}[{key!r}]") for key, item in value.items()]
        odd_key = next((key for key in value if not isinstance(key, (str, int, float, type(None)))), None)
        if odd_key is not None:
            return odd_key, f"The key {odd_key!r}"
    elif isinstance(value, (list, tuple)):
        inside = [(item, f"{where}[{index}]") for index, item in enumerate(value)]
    else:
        return value, where
    return next((found for item, place in inside if (found := _odd(item, place, seen)) is not None), None)


def _as_json(value: Any) -> str:
    kind, module = type(value).__name__, type(value).__module__.partition(".")[0]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return "x.item() makes a number of it"
    if module in ("numpy", "torch"):
        return "x.tolist() makes lists of it"
    if module == "pandas":
        return "x.to_dict('records') makes a list of it" if kind == "DataFrame" else "x.tolist() makes a list of it"
    if module == "PIL":
        return "save it as PNG or JPEG into an io.BytesIO and answer with its getvalue()"
    if kind == "coroutine":
        return "`await` it"
    if isinstance(value, (bytes, bytearray)):
        return "base64.b64encode(x).decode() makes text of it; bytes go alone, as the whole answer"
    if isinstance(value, (set, frozenset)) or kind in ("generator", "map", "filter", "dict_keys", "dict_values"):
        return "list(x) makes a list of it"
    if hasattr(value, "isoformat"):
        return "x.isoformat() makes text of it"
    if hasattr(value, "__dataclass_fields__"):
        return "dataclasses.asdict(x) makes a dict of it"
    return ""


def _article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
