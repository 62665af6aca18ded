"""Finding and loading the user's handler (as TorchServe 0.12 finds it, with errors that name their cause)."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from ts.context import Context
from ts.protocol.text import repr_of, said, text_of
from ts.runtime import tracebacks
from ts.runtime.tracebacks import traceback_of

_RUNTIME = str(Path(__file__).parent)

Settings = dict[str, Any]
Entry = Callable[[Any, Context], Any]


class HandlerNotUsable(ValueError):
    """The handler can't be found or has no entry point; the message has the reason."""


class Loaded(NamedTuple):
    """A handler ready to be called. `kind`: blocking, generator, async or continuous; `loop`: the async kind's;
    `takes`: rows as TorchServe's handlers do, or requests (`ts.tensors.types.InferenceRequest`); `tensors`: the model's
    name, version and declared inputs and outputs; `signature`: the handler's own declaration of them, for metadata
    (`platform`, lists `inputs` and `outputs` of name, datatype, shape); `takes_streams`: an async handler that reads
    the requests `following` one; `routes`: HTTP paths of the handler's own, each a `method` and the `path` (a template,
    `ts.protocol.path_template`), asked for as `ts.tensors.route_form.RouteRequest`; `completed`: the configuration of a
    model of another server, when the handler has added to it; `openai`: the handler's declarations for OpenAI's API
    (`openai_of`)."""

    entry: Entry
    context: Context
    kind: str
    loop: asyncio.AbstractEventLoop | None
    takes: str = "rows"
    tensors: dict[str, Any] | None = None
    signature: dict[str, Any] | None = None
    takes_streams: bool = False
    routes: Sequence[dict[str, str]] = ()
    completed: dict[str, Any] | None = None
    openai: dict[str, Any] | None = None


def load(settings: Settings) -> Loaded:
    """Imports and initialises the handler, by its adapter if written for another server; exceptions pass through."""
    if settings.get("renewable"):
        from ts.runtime.renewal import SourceImports

        SourceImports(settings["model_dir"]).begin()
    if settings.get("adapter"):
        adapted: Loaded = importlib.import_module(f"ts.compat.{settings['adapter']}").load(settings)
        return adapted
    context = context_of(settings)  # before the user's modules can stand in front of others
    _prepare_paths(settings)
    entry, initialize = entry_point_of(str(settings.get("handler") or ""), settings["model_dir"])
    kind = _kind(entry, settings)
    loop = new_loop() if kind == "async" else None
    _finish(initialize(context), loop)
    openai = openai_of(entry.target if isinstance(entry, _Handle) else sys.modules.get(entry.__module__))
    if settings.get("envelope"):
        entry = enveloped(entry, str(settings["envelope"]))
    if settings.get("continuous"):
        kind = _continuous(kind)
    return Loaded(entry, context, kind, loop, tensors=declared(settings), openai=openai)


def openai_of(handler: Any) -> dict[str, Any] | None:
    """The declarations for OpenAI's API in a handler's attributes, None without any: `speaks` (`openai_api`), `names`
    (`openai_models`) and `honours` (`openai_honours`; None: it speaks the API and checks requests itself); of a
    language model also `adapters` (`openai_adapters`), `fixed` (`adapters_fixed`) and `slots`. Raises
    HandlerNotUsable."""
    speaks = getattr(handler, "openai_api", False) is True
    found = {}
    for name in ("openai_models", "openai_honours"):
        value = getattr(handler, name, None)
        if value is not None and (isinstance(value, str) or not all(isinstance(one, str) for one in value)):
            raise HandlerNotUsable(f"the handler's {name} is a list of names, not {repr_of(value)}")
        found[name] = None if value is None else list(value)
    if not speaks and found["openai_honours"] is None:
        return None
    told = {"speaks": speaks, "names": found["openai_models"] or [], "honours": found["openai_honours"]}
    if (adapters := getattr(handler, "openai_adapters", None)) is not None:
        told |= {"adapters": adapters, "fixed": getattr(handler, "adapters_fixed", "")}
        told["slots"] = getattr(handler, "slots", 0)
    return told


def _kind(entry: Entry, settings: Settings) -> str:
    """The kind of a handler; with asyncCommunication a wrapper of an async function counts as async."""
    kind = kind_of(entry)
    return "async" if settings.get("asynchronous") and kind == "blocking" else kind


def _continuous(kind: str) -> str:
    if kind != "blocking":
        raise HandlerNotUsable(
            f"continuousBatching calls handle for every step and needs its answers returned, not by a {kind} handler"
        )
    return "continuous"


def new_loop() -> asyncio.AbstractEventLoop:
    """Makes the loop of an async handler, the current one in `initialize`."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def declared(settings: Settings) -> dict[str, Any]:
    tensors = settings.get("tensors") or {}
    return {
        "name": settings.get("model_name", ""),
        "version": settings.get("model_version", ""),
        "inputs": tensors.get("inputs") or {},
        "outputs": tensors.get("outputs") or {},
        "parameters": tensors.get("parameters") or {},
    }


def entry_point_of(handler: str, model_dir: str) -> tuple[Entry, Callable[[Context], Any]]:
    """The callable for batches of the handler `[dir/]name[.py][:function]`, and the call that initialises it.

    Raises HandlerNotUsable; exceptions of the module's import pass through.
    """
    module_name, _, function_name = handler.partition(":")
    return _entry_point(_import(module_name, model_dir), function_name or "handle")


def _prepare_paths(settings: Settings) -> None:
    """Puts the model's folder first on the import path of this process and of its child processes."""
    model_dir = settings["model_dir"]
    folder = os.path.join(model_dir, os.path.dirname(str(settings.get("handler") or "").partition(":")[0])).rstrip("/")
    more = [path for path in (folder, *(settings.get("python_path") or ())) if path != folder or os.path.isdir(path)]
    first = list(dict.fromkeys((model_dir, *more)))
    sys.path[:] = first + [path for path in sys.path if path not in first]
    importlib.invalidate_caches()
    known = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys((*known, *first)))
    os.chdir(model_dir)


def context_of(settings: Settings) -> Context:
    context = Context(
        settings.get("model_name", ""),
        settings["model_dir"],
        settings.get("manifest"),
        settings.get("batch_size", 1),
        settings.get("gpu_id"),
        limit_max_image_pixels=settings.get("limit_max_image_pixels", True),
        model_yaml_config=_model_config(settings),
    )
    context._metrics_source = cache(lambda: _metrics(settings))
    keys = settings.get("header_keys") or ()
    for attribute, key in zip(
        ("header_key_sequence_id", "header_key_sequence_start", "header_key_sequence_end"), keys, strict=False
    ):
        setattr(context, attribute, key)
    return context


def _model_config(settings: Settings) -> dict[str, Any]:
    path, more = settings.get("config_file"), settings.get("handler_settings") or {}
    found: Any = dict(settings.get("model_config") or {})
    if path:
        import yaml

        found = yaml.safe_load(Path(settings["model_dir"], path).read_text(encoding="utf-8"))
    config = found if isinstance(found, dict) else {}
    return {**config, "handler": {**(config.get("handler") or {}), **more}} if more else config


def _metrics(settings: Settings) -> Any:
    from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

    metrics = MetricsCacheYamlImpl(settings.get("metrics_config"), settings.get("model_name"))
    metrics.initialize_cache()
    return metrics


# --- the module


def _import(handler: str, model_dir: str) -> ModuleType:
    """The module of `[dir/]name[.py]`: the archive's own, otherwise one on the path, otherwise a built-in handler."""
    name = os.path.basename(handler).removesuffix(".py")
    if not name:
        raise HandlerNotUsable("the archive names no handler: give one to the archiver or when registering")
    own = Path(model_dir, f"{name}.py")
    if own.is_file() and ("." in name or (name in sys.modules and not is_at(sys.modules[name], own))):
        return import_file(f"ts_handler_{name.replace('.', '_')}", own)  # `handler.v2` would be a module of a package
    if importlib.util.find_spec(name) is not None:
        return importlib.import_module(name)
    builtin = f"ts.torch_handler.{handler.replace('/', '.').removesuffix('.py')}"
    if _exists(builtin):
        return importlib.import_module(builtin)
    raise HandlerNotUsable(
        f"handler {handler!r} not found: there is no {name}.py in {model_dir} or on the Python path, "
        f"and no built-in handler of that name{_meant(name, model_dir)}"
    )


def _meant(name: str, model_dir: str) -> str:
    """`; did you mean X?` for the model's file or the built-in handler with the most similar name."""
    folders = (Path(model_dir), Path(_RUNTIME).parent / "torch_handler")
    known = {file.stem for folder in folders for file in folder.glob("*.py") if not file.stem.startswith("_")}
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _exists(module_name: str) -> bool:
    try:
        return importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError:
        return False


def is_at(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and os.path.realpath(file) == os.path.realpath(path)


def import_file(name: str, path: Path) -> ModuleType:
    """Imports a file whose own name is taken by a module that is already in use."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# --- the entry point

#: The advice for files of other systems' users.
PREDICT_HINT = """{file} has a function predict, and no handler that calls it. Add:

    def handle(data, context):
        if data is None:  # the call when the model is loaded
            return None
        return [predict(row.get("data") or row.get("body")) for row in data]"""
METHOD_HINT = """class {name} in {file} has a method predict, and no method handle that calls it. Add:

    def handle(self, data, context):
        return [self.predict(row.get("data") or row.get("body")) for row in data]"""
NETWORK_HINT = """{file} has a torch.nn.Module, {name}, and no handler that loads and calls it. Add:

    class Handler:
        def initialize(self, context):  # called once, when the model is loaded
            self.model = {name}().eval()  # and its weights: load_state_dict

        def handle(self, data, context):  # a batch of requests; returns one answer for each
            inputs = torch.tensor([row.get("data") or row.get("body") for row in data])
            with torch.inference_mode():
                return self.model(inputs).tolist()"""


def _entry_point(module: ModuleType, name: str) -> tuple[Entry, Callable[[Context], Any]]:
    found = getattr(module, name, None)
    if found is None:
        found = _only_class(module, name)
    if not inspect.isclass(found):
        function: Entry = found
        return function, _initialiser(function)
    if _is_network(found):
        raise HandlerNotUsable(NETWORK_HINT.format(name=found.__name__, file=_file_of(module)))
    handler = found()
    if not callable(getattr(handler, "handle", None)):
        raise HandlerNotUsable(_without_handle(module, found, handler))
    return _Handle(handler), getattr(handler, "initialize", lambda context: None)


def _initialiser(function: Entry) -> Callable[[Context], Any]:
    """The call that initialises a function: one without requests. A generator or an async function runs nothing in such
    a call, as in TorchServe, so it gets none. Raises HandlerNotUsable, which describes the call."""
    if kind_of(function) != "blocking":
        return lambda context: None

    def call(context: Context) -> Any:
        try:
            return function(None, context)
        except MemoryError:
            raise
        except Exception as error:
            name = getattr(function, "__name__", "handle")
            what_to_do = tracebacks.safely(tracebacks.of_exception, error) or (
                "A handler that is a function is called so once, when its model is loaded: begin it with "
                "`if data is None: return`"
            )
            raise HandlerNotUsable(f"{text_of(name)}(None, context) raised {said(error)}. {what_to_do}") from error

    return call


def renewed(loaded: Loaded, settings: Settings) -> Loaded:
    """A loaded handler whose modules have new code: a function is looked up again, and it may be of another kind."""
    entry = loaded.entry
    if settings.get("envelope") or settings.get("continuous"):
        return loaded
    if not isinstance(entry, _Handle):
        entry = getattr(sys.modules.get(entry.__module__), getattr(entry, "__name__", ""), entry)
    return loaded._replace(entry=entry, kind=_kind(entry, settings))


class _Handle:
    """A handler object's `handle`, as it is at the time of the call: initialize may replace it."""

    __slots__ = ("target",)

    def __init__(self, target: Any) -> None:
        self.target = target

    def __call__(self, data: Any, context: Context) -> Any:
        return self.target.handle(data, context)


def _only_class(module: ModuleType, function_name: str) -> type:
    own = [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__]
    if len(own) > 1:  # helper classes may stand beside it
        own = [one for one in own if callable(_handle_of(one))] or own
    if len(own) == 1 and not (inspect.isfunction(getattr(module, "predict", None)) and _handle_of(own[0]) is None):
        return own[0]
    if inspect.isfunction(getattr(module, "predict", None)) and not any(callable(_handle_of(one)) for one in own):
        raise HandlerNotUsable(PREDICT_HINT.format(file=_file_of(module)))
    networks = [one for one in own if _is_network(one)]
    if networks and len(networks) == len(own):
        raise HandlerNotUsable(NETWORK_HINT.format(name=networks[-1].__name__, file=_file_of(module)))
    lacks = f"{module.__name__} has no function {function_name}(data, context)"
    if not own:
        known = {name: one for name, one in vars(module).items() if inspect.isfunction(one)}
        functions = [name for name, one in known.items() if one.__module__ == module.__name__]
        there = f". Its functions are {', '.join(functions)}" if functions else ""
        raise HandlerNotUsable(f"{lacks}, and no class with a method handle(data, context){there}")
    raise HandlerNotUsable(
        f"{lacks}, and several classes: {', '.join(one.__name__ for one in own)}. Leave one class with a method handle "
        "in this file, and put the others into files that it imports"
    )


def _handle_of(found: type) -> Any:
    return getattr(found, "handle", None)


def _without_handle(module: ModuleType, found: type, handler: object) -> str:
    if callable(getattr(handler, "predict", None)):
        return METHOD_HINT.format(name=found.__name__, file=_file_of(module))
    return f"class {found.__name__} of {module.__name__} has no method handle(data, context)"


def _is_network(found: type) -> bool:
    """Whether a class is a torch.nn.Module without a handler's methods."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(found, torch.nn.Module) and not callable(_handle_of(found))


def _file_of(module: ModuleType) -> str:
    return os.path.basename(getattr(module, "__file__", None) or module.__name__)


def kind_of(entry: Entry) -> str:
    function = inspect.unwrap(entry.target.handle if isinstance(entry, _Handle) else entry)
    if not inspect.isroutine(function):
        function = getattr(function, "__call__", function)  # noqa: B004 - the method itself, to look at
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "async"
    return "generator" if inspect.isgeneratorfunction(function) else "blocking"


#: The flags of functions whose call runs none of their code before the first step.
_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def waits_for_a_step(entry: Entry) -> bool:
    """Whether a call of the entry point runs nothing of the handler before the first step of what it returns: it is a
    generator function or an async one, and no decorator wraps it."""
    function = entry.target.handle if isinstance(entry, _Handle) else entry
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return isinstance(code, CodeType) and bool(code.co_flags & _LATER)


def _finish(result: Any, loop: asyncio.AbstractEventLoop | None) -> None:
    if inspect.isawaitable(result):
        (loop or asyncio.new_event_loop()).run_until_complete(_await(result))


async def _await(result: Any) -> None:
    await result


def enveloped(entry: Entry, name: str) -> Entry:
    """The entry point inside a request envelope (`body`, `json`, `kserve`, `kservev2`). Raises HandlerNotUsable."""
    kind = kind_of(entry)
    if kind != "blocking":
        raise HandlerNotUsable(f"service_envelope {name} needs a handler that returns its result, not a {kind} one")
    full_name = f"ts.torch_handler.request_envelope.{name}"
    if not _exists(full_name):
        raise HandlerNotUsable(f"there is no request envelope {name!r}")
    module = importlib.import_module(full_name)
    classes = [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__]
    envelope: Any = classes[0]
    handle: Entry = envelope(entry).handle
    return handle


# --- when it fails

#: The packages whose name for pip differs from their import name.
_INSTALLED_AS = {"PIL": "pillow", "cv2": "opencv-python", "sklearn": "scikit-learn", "skimage": "scikit-image"}


def _missing_package(error: ModuleNotFoundError) -> str:
    """How to get the package whose import failed; "" for a module of a package that is there."""
    name = (error.name or "").partition(".")[0]
    if not name or _exists(name):
        return ""
    package = _INSTALLED_AS.get(name, name)
    return (
        f"Install it where the workers run ({shlex.quote(sys.executable)} -m pip install {package}), or list it in "
        "the archive's requirements file (docs/environments.md)"
    )


def describe_failure(error: BaseException) -> dict[str, Any]:
    """The fields of LoadFailed: `code`, `message` and the end of the traceback."""
    code, traceback = 500, traceback_of(error, runtime=False)
    if issubclass(type(error), ModuleNotFoundError) and (missing := tracebacks.safely(_missing_package, error)):
        # Without torch no handler of a server can be loaded, and the server has said so at its start: no traceback.
        is_told = getattr(error, "name", "") == "torch"
        message, traceback = f"ModuleNotFoundError: {text_of(error)}. {missing}", "" if is_told else traceback
    elif issubclass(type(error), HandlerNotUsable):
        message = text_of(error)
    else:
        if tracebacks.is_out_of_memory(error):
            code, message = 507, f"System out of memory: {said(error)}"
        elif issubclass(type(error), SystemExit):
            given: Any = vars(SystemExit)["code"]  # a class of the handler's may have another
            message = f"The handler called sys.exit({repr_of(given.__get__(error))}) while it was loaded"
        else:
            message = said(error)
        if what_to_do := tracebacks.safely(tracebacks.of_exception, error):
            message = f"{message}. {what_to_do}"
    return {"code": code, "message": message, "traceback": traceback}
