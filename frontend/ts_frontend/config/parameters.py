"""The parameters of the register and scale calls: one table for HTTP, gRPC, the command line and the API description.

A new one has its row here, a field in `models/settings.py` if it is a setting of the model, and a field in
`protos/management.proto`.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The most workers of one model version: each is a process, and a mistyped number must not start thousands.
WORKERS_MAX = 1024
#: The `timeout` of a scale call that means no timeout.
UNLIMITED = -1
_INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class CallParameter:
    """`name`: of the query parameter, of the member of a JSON body, and of the field of the gRPC message; `kind`: str,
    int or bool; `default`: the value if it isn't given. `setting`: its field in `Requested`, whose value is from
    `least` to `most`; "" for a parameter of the call itself.

    `tuning`: over HTTP, text that isn't a number counts as not given, as in TorchServe. `zero_needs`: a 0 counts as not
    given unless the parameter of this name has a value. `http`: whether HTTP has it. `flag`: of the command line, ""
    for none, with its `metavar` and `help`."""

    name: str
    kind: type = str
    default: str | int | bool | None = None
    required: bool = False
    setting: str = ""
    least: int = 0
    most: int = _INT_MAX
    tuning: bool = False
    zero_needs: str = ""
    http: bool = True
    flag: str = ""
    metavar: str | None = None
    help: str = ""


_URL = CallParameter("url", required=True)
_RESPONSE_TIMEOUT = CallParameter(
    "response_timeout",
    int,
    setting="response_timeout_s",
    least=1,
    tuning=True,
    flag="--response-timeout",
    metavar="SECONDS",
    help="Limit of one answer.",
)
_STARTUP_TIMEOUT = CallParameter(
    "startup_timeout",
    int,
    setting="startup_timeout_s",
    least=1,
    tuning=True,
    zero_needs="initial_workers",
    flag="--startup-timeout",
    metavar="SECONDS",
    help="Limit of loading the model.",
)

REGISTER = (
    _URL,
    CallParameter(
        "model_name", setting="model_name", flag="--name", help="Register under this name.  [default: the archive's]"
    ),
    CallParameter("handler", setting="handler", flag="--handler", help="Use this handler in place of the archive's."),
    CallParameter("runtime", setting="runtime", flag="--runtime", help="Use this runtime in place of the archive's."),
    CallParameter(
        "batch_size",
        int,
        setting="batch_size",
        least=1,
        tuning=True,
        flag="--batch-size",
        help="Requests the handler gets at a time.",
    ),
    CallParameter(
        "max_batch_delay",
        int,
        setting="max_batch_delay_ms",
        tuning=True,
        flag="--max-batch-delay",
        metavar="MS",
        help="How long to wait for a full batch.",
    ),
    CallParameter(
        "initial_workers",
        int,
        setting="initial_workers",
        most=WORKERS_MAX,
        flag="--workers",
        help="Workers to start.  [default: the archive's number, or 1]",
    ),
    CallParameter("synchronous", bool, True),
    _RESPONSE_TIMEOUT,
    _STARTUP_TIMEOUT,
    CallParameter("s3_sse_kms", bool, False),
)
REGISTER_WORKFLOW = (_URL, CallParameter("workflow_name"), _RESPONSE_TIMEOUT, _STARTUP_TIMEOUT)
SCALE = (
    CallParameter("min_worker", int, 1),
    CallParameter("max_worker", int),
    CallParameter("synchronous", bool, False),
    CallParameter("timeout", int, UNLIMITED, least=-_INT_MAX, http=False),
)
SETTINGS = tuple(row for row in REGISTER if row.setting)
