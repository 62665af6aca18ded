"""KServe's and aiSSEMBLE's options: every source, and which wins. Promises 003-11 to 003-22."""

from __future__ import annotations

from pathlib import Path

import pytest

from ts.compat import run
from ts_frontend.cli import program
from ts_frontend.cli import program as beside
from ts_frontend.config.foreign import kserve as options
from ts_frontend.config.foreign import kserve as properties_file
from ts_frontend.config.kinds import ConfigError, ProgramLine, ProgramLines

PROGRAM = ProgramLines((ProgramLine(("/models/model0",)), ProgramLine(("/models/a;b",))))

#: aiSSEMBLE's nine: the option, its default, and a text with its value for each source.
NINE = {
    "http_port": (8080, "9001", 9001),
    "grpc_port": (8081, "9002", 9002),
    "workers": (1, "3", 3),
    "max_threads": (4, "7", 7),
    "max_asyncio_workers": (None, "5", 5),
    "enable_grpc": (True, "False", False),
    "enable_docs_url": (False, "True", True),
    "enable_latency_logging": (True, "false", False),
    "access_log_format": (None, "%(h)s", "%(h)s"),
}


def resolved(argv=(), environ=None, properties=None, given=None):
    return options.resolve(argv, environ or {}, properties or {}, given or {})


@pytest.mark.parametrize("name", NINE)
def test_each_source_alone(name):
    default, text, value = NINE[name]
    assert resolved()[name].value == default
    found = [
        resolved([f"--{name}={text}"]),
        resolved([f"--{name}", text]),
        resolved([f"--{name.replace('_', '-')}={text}"]),
        resolved(environ={f"KSERVE_{name.upper()}": text}),
        resolved(properties={f"kserve_{name}": text}),
        resolved(given={name: value}),
    ]
    assert [one[name].value for one in found] == [value] * 6
    assert found[3][name].source == f"environment KSERVE_{name.upper()}"
    assert found[4][name].source == f"oip.properties kserve_{name}"


def test_an_argument_beats_the_environment_beats_the_file_beats_the_program_beats_the_default():
    argv, environ = ["--http_port=1"], {"KSERVE_HTTP_PORT": "2"}
    properties, given = {"kserve_http_port": "3"}, {"http_port": 4}
    found = []
    for _ in range(5):
        found.append(resolved(argv, environ, properties, given)["http_port"].value)
        stronger = next((one for one in (argv, environ, properties, given) if one), None)
        if stronger is not None:
            stronger.clear()
    assert found == [1, 2, 3, 4, 8080]


def test_an_empty_text_stands_for_no_value():
    found = resolved(environ={"KSERVE_MAX_ASYNCIO_WORKERS": ""}, properties={"kserve_access_log_format": ""})
    assert (found["max_asyncio_workers"].value, found["access_log_format"].value) == (None, None)


@pytest.mark.parametrize(
    ("argv", "environ", "properties", "text"),
    [
        (["--http_port=x"], {}, {}, "--http_port: Invalid integer value 'x'"),
        ([], {"KSERVE_WORKERS": "two"}, {}, "environment KSERVE_WORKERS: Invalid integer value 'two'"),
        ([], {}, {"kserve_grpc_port": ""}, "oip.properties kserve_grpc_port: Invalid integer value ''"),
        (["--enable_grpc=maybe"], {}, {}, "'maybe' is neither true"),
        (["--http_port=70000"], {}, {}, "70000 is not a port"),
        (["--workers=0"], {}, {}, "the least is 1"),
        (["--http_port"], {}, {}, "expected one argument"),
    ],
)
def test_what_cannot_be_a_value_is_named_with_its_source(argv, environ, properties, text):
    with pytest.raises(ConfigError, match=text):
        resolved(argv, environ, properties)


def test_a_programs_own_arguments_are_left_to_it():
    assert resolved(["--grpc", "--threshold", "3", "file", "--http_port=5"])["http_port"].value == 5


def test_what_is_accepted_without_effect_is_said():
    environ = {"AUTH_ENABLED": "true", "KSERVE_MAX_THREADS": "9"}
    argv = ["--event_loop=uvloop", "--model_name=m", "--log_config_file=l.yaml"]
    lines = options.notes(resolved(argv, environ), environ, {})
    assert [line.split(" ")[0] for line in lines] == ["max_threads", "event_loop", "AUTH_ENABLED"]
    assert lines[1].startswith("event_loop (--event_loop) has no effect: ")


def test_oip_properties_are_krausenings(tmp_path: Path):
    base, more = tmp_path / "base", tmp_path / "more"
    for place, text in ((base, "kserve_http_port=9000\nkserve_workers = 2\n"), (more, "kserve_workers: 4\n")):
        place.mkdir()
        (place / "oip.properties").write_text(text)
    environ = {"KRAUSENING_BASE": str(base), "KRAUSENING_EXTENSIONS": str(more)}
    assert properties_file.read(environ) == {"kserve_http_port": "9000", "kserve_workers": "4"}
    assert properties_file.read({}) == {}


def test_properties_that_cannot_be_read_are_named(tmp_path: Path):
    (tmp_path / "oip.properties").write_text("a=\\uZZ")
    with pytest.raises(ConfigError, match=r"oip.properties can't be read"):
        properties_file.read({"KRAUSENING_BASE": str(tmp_path)})


def test_options_become_the_servers_settings(tmp_path: Path):
    found = resolved(["--workers=3", "--http_port=9000"], {"KSERVE_ENABLE_GRPC": "false"})
    options_of = {one.key: one for one in program.settings(found, PROGRAM, tmp_path, {})}
    assert options_of["inference_address"].text == options_of["metrics_address"].text == "http://0.0.0.0:9000"
    assert (options_of["default_workers_per_model"].text, options_of["enable_grpc"].text) == ("3", "false")
    assert options_of["enable_grpc"].flag == "environment KSERVE_ENABLE_GRPC"
    assert options_of["program"].text == "/models/model0; '/models/a;b'"
    assert options_of["disable_token_authorization"].text == "true"
    keys = {one.key for one in program.settings(found, PROGRAM, tmp_path, {"TS_TOKEN_PATH": "/keys"})}
    assert "disable_token_authorization" not in keys


def test_what_is_served_beside_a_program():
    words = ["--times=3", "--model-store", "/s", "--models", "a", "b=c.mar", "--model_repository=/r", "--http_port=1"]
    assert [(one.key, one.text, one.flag) for one in beside.co_served_settings(words)] == [
        ("model_store", "/s", "--model_store"),
        ("load_models", "a,b=c.mar", "--models"),
        ("model_repository", "/r", "--model_repository"),
    ]
    assert beside.co_served_settings(["--times=3", "--model_name", "x"]) == []
    assert beside.co_served_notes(beside.co_served_settings(["--model_store=/s"])) and not beside.co_served_notes(
        beside.co_served_settings(words)
    )
    with pytest.raises(ConfigError, match="model_store"):
        beside.co_served_settings(["--model_store"])


def test_options_before_a_program_are_the_servers():
    words = ["--model_store", "/s", "--models=a", "main.py", "--models", "x"]
    assert run.split(words) == (["--model_store=/s", "--models=a"], ["main.py", "--models", "x"])
    assert run.split(["--nope", "main.py"]) == ([], ["--nope", "main.py"])
    assert run.split(["--models"]) == (["--models="], [])


def test_management_is_open_to_nobody_else(tmp_path: Path):
    short = {one.key: one.text for one in program.settings(resolved(), PROGRAM, Path("/tmp/a"), {})}
    assert (short["management_address"], short["grpc_management_address"]) == (
        "unix:/tmp/a/http.sock",
        "unix:/tmp/a/grpc.sock",
    )
    long = {one.key: one.text for one in program.settings(resolved(), PROGRAM, Path("/tmp", "a" * 100), {})}
    assert (long["management_address"], long["grpc_management_address"]) == ("http://127.0.0.1:0", "127.0.0.1")
