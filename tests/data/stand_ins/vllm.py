"""A stand-in for the package vllm: its web application repeats the prompt, word by word.

It is there for the server around the engine; the real one, which takes a minute to start, is asked by
tests/e2e/test_language_models.py. `die`, `fail` and `wait` as a prompt do so: the engine is dead after `die`.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import types

__version__ = "0.0.1"


class Arguments(argparse.ArgumentParser):
    """vLLM's parser."""


def make_arg_parser(parser):
    for name in ("--model", "--chat-template"):
        parser.add_argument(name)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--lora-modules", nargs="+", type=lambda word: types.SimpleNamespace(**json.loads(word)))
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--compilation-config", type=json.loads)
    for name in ("--enable-lora", "--disable-log-stats"):
        parser.add_argument(name, action=argparse.BooleanOptionalAction, default=name != "--enable-lora")
    return parser


class Engine:
    def __init__(self, args):
        self.args, self.dead, self.running = args, False, 0

    async def check_health(self):
        if self.dead:
            raise RuntimeError("it died")


@contextlib.asynccontextmanager
async def build_async_engine_client(args):
    yield Engine(args)


def build_app(args):
    async def app(scope, receive, send):
        engine, body = app.state.engine, json.loads((await receive())["body"])
        words = str(body.get("prompt", "")).split()
        engine.dead |= words == ["die"]
        if words == ["fail"]:
            raise OSError("the application failed")
        if scope["path"] not in ("/v1/completions", "/v1/chat/completions"):
            return await said(send, 404, {"detail": "Not Found"})
        engine.running += 1
        try:
            if words == ["wait"]:
                return await until_left(receive)
            if not body.get("stream"):
                choice = {"index": 0, "text": " ".join(words), "finish_reason": "stop"}
                return await said(send, 200, {"choices": [choice], "asked": body.get("model")})
            await begun(send, 200, b"text/event-stream")
            left = asyncio.ensure_future(until_left(receive))
            for word in words or iter(lambda: "on", None):  # without words it never ends
                await piece(send, b"data: " + json.dumps({"choices": [{"index": 0, "text": word}]}).encode() + b"\n\n")
                await asyncio.sleep(0)
                if left.done():
                    return None
            left.cancel()
            await piece(send, b"data: [DONE]\n\n", more=False)
        finally:
            engine.running -= 1

    app.state = types.SimpleNamespace()
    return app


async def init_app_state(engine_client, state, args):
    state.engine = engine_client


async def until_left(receive):
    assert (await receive())["type"] == "http.disconnect"


async def begun(send, status, kind):
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})


async def piece(send, data, more=True):
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def said(send, status, value):
    await begun(send, status, b"application/json")
    await piece(send, json.dumps(value, separators=(",", ":")).encode(), more=False)


FlexibleArgumentParser = Arguments
make_arg_parser.__module__ = "vllm.entrypoints.openai.cli_args"
for _name in ("entrypoints", "entrypoints.openai", "entrypoints.openai.cli_args", "entrypoints.openai.api_server"):
    sys.modules[f"vllm.{_name}"] = types.ModuleType(f"vllm.{_name}")
    for _one in (
        "FlexibleArgumentParser",
        "make_arg_parser",
        "build_async_engine_client",
        "build_app",
        "init_app_state",
    ):
        setattr(sys.modules[f"vllm.{_name}"], _one, globals()[_one])
