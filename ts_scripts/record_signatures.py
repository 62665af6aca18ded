"""Records the declarations of the vLLM functions that `vllm_handler` calls, from wheels, without running them.

Usage: python ts_scripts/record_signatures.py WHEEL… > tests/data/stand_ins/vllm_signatures.json

The wheels are those of releases of vllm and transformers (`pip download --no-deps vllm==VERSION`); nothing of them is
installed or imported. The record has for each release and engine the kind of each function (`plain`, `coroutine` or
`async generator`) and its parameters as Python writes them, with `...` for a default.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

#: The engines of vLLM by file; a release has one engine, or the old and the new one.
ENGINES = {"AsyncLLMEngine": "vllm/engine/async_llm_engine.py", "AsyncLLM": "vllm/v1/engine/async_llm.py"}
ENGINE_METHODS = ("from_engine_args", "generate", "get_tokenizer")
#: The other called declarations with their files: methods, and classes whose fields are their constructor's parameters.
OF_VLLM = {
    "AsyncEngineArgs": "vllm/engine/arg_utils.py",
    "SamplingParams.from_optional": "vllm/sampling_params.py",
    "LoRARequest": "vllm/lora/request.py",
    "CompletionOutput": "vllm/outputs.py",
    "RequestOutput.__init__": "vllm/outputs.py",
}
#: The same for the engine's tokenizers: those of transformers, and in later releases vLLM's own.
TOKENIZERS = {
    "transformers": ("PreTrainedTokenizerBase", "transformers/tokenization_utils_base.py"),
    "vllm": ("TokenizerLike", "vllm/tokenizers/protocol.py"),
}
TOKENIZER_METHODS = ("apply_chat_template", "encode")
#: The error of the engine for a request that it refuses; a release without it raises ValueError.
REFUSAL, REFUSAL_FILE = "VLLMValidationError", "vllm/exceptions.py"

Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"
#: `kind` and `parameters` of a function.
Declaration: TypeAlias = "dict[str, str]"


class NotThere(LookupError):
    """A wheel lacks a declaration; the message names it and its place."""


def kind(function: Function) -> str:
    if isinstance(function, ast.FunctionDef):
        return "plain"
    return "async generator" if any(isinstance(one, ast.Yield) for one in ast.walk(function)) else "coroutine"


def declared(function: Function) -> Declaration:
    """The parameters without `self` and `cls`, types and default values."""
    arguments = function.args
    static = any(ast.unparse(one) == "staticmethod" for one in function.decorator_list)
    named = [*arguments.posonlyargs, *arguments.args]
    for one in (*named, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if one is not None:
            one.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [one and ast.Constant(...) for one in arguments.kw_defaults]
    if not static:
        arguments.args = arguments.args[1:]
    return {"kind": kind(function), "parameters": ast.unparse(arguments)}


def fields(name: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """The fields of a dataclass or msgspec Struct and its bases in the same file, as parameters of its constructor."""
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from fields(base.id, classes)
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id + ("=..." if node.value is not None else "")


def member(tree: ast.Module, name: str) -> Declaration:
    """The declaration of `Class` or `Class.method`. Raises KeyError."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    owner, _, method = name.partition(".")
    if not method:
        return {"kind": "plain", "parameters": ", ".join(fields(owner, classes))}
    functions = {
        node.name: node for node in classes[owner].body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }  # of overloads the last, which is the one that runs
    return declared(functions[method])


def read(wheel: zipfile.ZipFile, path: str, name: str) -> Declaration:
    """The declaration `name` in a file of the wheel. Raises NotThere."""
    try:
        return member(ast.parse(wheel.read(path)), name)
    except KeyError:
        raise NotThere(f"{wheel.filename} has no {name} in {path}") from None


def tokenizer(wheel: zipfile.ZipFile, package: str) -> dict[str, Declaration]:
    """The tokenizer's methods; none for a release without tokenizers of its own."""
    owner, path = TOKENIZERS[package]
    if path not in wheel.namelist():
        return {}
    return {f"Tokenizer.{method}": read(wheel, path, f"{owner}.{method}") for method in TOKENIZER_METHODS}


def refusal(wheel: zipfile.ZipFile) -> dict[str, Declaration]:
    """The base class of the error, as a parameter."""
    if REFUSAL_FILE in wheel.namelist():
        for node in ast.parse(wheel.read(REFUSAL_FILE)).body:
            if isinstance(node, ast.ClassDef) and node.name == REFUSAL:
                return {REFUSAL: {"kind": "class", "parameters": ast.unparse(node.bases[0])}}
    return {REFUSAL: {"kind": "class", "parameters": "ValueError"}}


def engines(wheel: zipfile.ZipFile) -> Iterator[tuple[str, dict[str, Declaration]]]:
    """Each engine's name, and its methods under the name that all releases export it by."""
    for name, path in ENGINES.items():
        if path in wheel.namelist() and f"class {name}" in wheel.read(path).decode():
            yield name, {f"AsyncLLMEngine.{method}": read(wheel, path, f"{name}.{method}") for method in ENGINE_METHODS}


def recorded(path: str) -> dict[str, dict[str, Declaration]]:
    """The declarations by `PACKAGE VERSION[ ENGINE]`. Raises NotThere."""
    package, version = Path(path).name.split("-")[:2]
    with zipfile.ZipFile(path) as wheel:
        more = tokenizer(wheel, package)
        if package == "transformers":
            return {f"{package} {version}": more}
        more |= {name: read(wheel, where, name) for name, where in OF_VLLM.items()} | refusal(wheel)
        return {f"{package} {version} {engine}": methods | more for engine, methods in engines(wheel)}


def main(paths: Sequence[str]) -> None:
    """Prints the record of all wheels."""
    found: dict[str, dict[str, Declaration]] = {}
    for path in paths:
        found |= recorded(path)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
