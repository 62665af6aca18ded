"""The precedence of a setting's sources, refusals, warnings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ts_frontend.caching.cache import CacheRule
from ts_frontend.errors import InvalidArgument
from ts_frontend.models.settings import ModelSettings, Requested, model_name_for, resolve
from ts_frontend.workers.memory import DemandRule, Memory


@dataclass(frozen=True)
class Server:
    default_response_timeout: int = 120
    load_on_demand: bool = False
    model_keep_alive_s: float = 300.0
    default_startup_timeout: int = 110
    default_workers_per_model: int = 0
    job_queue_size: int = 100
    max_concurrency: int = 64
    service_envelope: str | None = None
    ray_address: str | None = None


NOTHING = Requested()


def decide(requested: Requested = NOTHING, yaml: Any = None, models: Any = None, **server: Any) -> ModelSettings:
    defaults: Any = Server(**server)
    return resolve(requested, yaml or {}, models or {}, defaults)


@pytest.mark.parametrize(
    ("requested", "yaml", "models", "expected"),
    [(2, 3, 4, 2), (None, 3, 4, 3), (None, None, 4, 4), (None, None, None, 1), (None, "3", 4, 4), (None, None, 0, 1)],
)
def test_batch_size_call_then_yaml_then_models(requested: Any, yaml: Any, models: Any, expected: int) -> None:
    settings = decide(Requested(batch_size=requested), {"batchSize": yaml}, {"batchSize": models})
    assert settings.batch_size == expected


@pytest.mark.parametrize(
    ("yaml", "expected", "word"),
    [
        ({"minWorkers": 3, "maxWorkers": 2}, 5, "less than minWorkers"),
        ({"minWorkers": 0}, 1, "counts as 1"),
        ({"minWorkers": 1025}, 5, "at most 1024 workers"),
        ({"maxWorkers": 2}, 5, "only together"),
        ({"minWorkers": "two"}, 5, "'two'"),
    ],
)
def test_worker_counts_that_make_no_sense_are_told(yaml: Any, expected: int, word: str) -> None:
    settings = decide(Requested(initial_workers=5), yaml)
    assert settings.min_workers == expected
    assert word in settings.warnings[0]


def test_every_key_of_the_yaml_arrives() -> None:
    settings = decide(
        yaml={
            "deviceType": "gpu",
            "deviceIds": [2, 0],
            "parallelType": "tp",
            "torchrun": {"nproc-per-node": 4},
            "maxRetryTimeoutInSec": 0,
            "clientTimeoutInMills": 50,
            "jobQueueSize": 7,
            "useJobTicket": True,
            "useVenv": True,
            "sequenceBatching": True,
            "continuousBatching": True,
            "asyncCommunication": True,
            "sequenceMaxIdleMSec": 10,
            "sequenceTimeoutMSec": 20,
            "maxNumSequence": 3,
            "maxSequenceJobQueueSize": 4,
            "maxConcurrency": 9,
            "handler": {"profile": True},
        }
    )
    assert (settings.device_type, settings.device_ids) == ("gpu", (2, 0))
    assert (settings.parallel_type, settings.parallel_level) == ("tp", 4)
    assert (settings.max_retry_timeout_s, settings.client_timeout_ms, settings.job_queue_size) == (0, 50, 7)
    assert settings.use_job_ticket and settings.use_venv and settings.stateful
    assert settings.continuous_batching and settings.async_communication
    assert (settings.sequence_max_idle_ms, settings.sequence_timeout_ms) == (10, 20)
    assert (settings.max_num_sequence, settings.max_sequence_job_queue_size, settings.max_concurrency) == (3, 4, 9)
    assert settings.warnings == ()


def test_models_on_demand() -> None:
    asked = {"loadOnDemand": True, "keepAlive": 5, "pinned": True, "modelMemory": "1 MiB", "modelGpuMemory": "2 GiB"}
    assert decide(yaml=asked).demand == DemandRule(5, True, Memory(1 << 20, 2 << 30))
    assert decide(yaml={"keepAlive": 5}).demand is None, "only who asks for it"
    assert decide(yaml={}, load_on_demand=True).demand == DemandRule(300)
    assert decide(yaml={"loadOnDemand": False}, load_on_demand=True).demand is None
    for other in ("sequenceBatching", "useJobTicket"):
        refused = decide(yaml={"loadOnDemand": True, other: True})
        assert refused.demand is None and other in refused.warnings[0]


class Recording(dict[str, Any]):
    """A configuration that remembers which settings were read."""

    def __init__(self) -> None:
        super().__init__(parallelType="tp")
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


@pytest.mark.parametrize(
    ("yaml", "rule", "words"),
    [
        ({"cache": True}, CacheRule(), []),
        ({"cache": False}, None, []),
        ({"cache": {}}, CacheRule(), []),
        (
            {"cache": {"size": "2MiB", "ttl": 1.5, "key": ["X-Tenant", "b"]}},
            CacheRule(2 << 20, 1.5, frozenset({"x-tenant", "b"})),
            [],
        ),
        ({"cache": {"key": "X-Tenant"}}, CacheRule(headers=frozenset({"x-tenant"})), []),
        ({"cache": {"ttl": -1, "size": "big", "key": 5}}, CacheRule(), ["size", "ttl", "key"]),
        ({"cache": {"sizes": 3}}, CacheRule(), ["did you mean size"]),
        ({"cache": "yes"}, None, ["cache"]),
        ({"cache": True, "sequenceBatching": True}, None, ["sequenceBatching"]),
    ],
)
def test_the_cache_of_answers(yaml: Any, rule: CacheRule | None, words: list[str]) -> None:
    found = decide(yaml=yaml)
    assert found.cache == rule
    assert len(found.warnings) == len(words) and all(any(word in one for one in found.warnings) for word in words)


def test_the_page_names_every_key(root: Path) -> None:
    config = Recording()
    decide(yaml=config)
    page = (root / "docs" / "model-config.md").read_text()
    assert len(config.asked) > 20
    assert [key for key in sorted(config.asked) if f"`{key}" not in page] == []


@pytest.mark.parametrize(
    ("wish", "word"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"max_batch_delay_ms": -1}, "max_batch_delay"),
        ({"initial_workers": -1}, "initial_workers"),
        ({"initial_workers": 1025}, "from 0 to 1024"),
        ({"response_timeout_s": 0}, "response_timeout"),
        ({"startup_timeout_s": 2**31}, "startup_timeout"),
        ({"batch_size": True}, "batch_size"),
        ({"runtime": "python9"}, "Invalid RuntimeType value: python9"),
        ({"runtime": "LSP"}, "Invalid RuntimeType value: LSP"),
    ],
)
def test_calls_that_ask_for_nonsense_are_refused(wish: Any, word: str) -> None:
    with pytest.raises(InvalidArgument, match=word):
        Requested(**wish)


@pytest.mark.parametrize(
    ("given", "manifest", "file", "expected"),
    [
        ("given", "manifest", "file.mar", "given"),
        (None, "manifest", "file.mar", "manifest"),
        (None, None, "my-model.v2.mar", "my_model_v2"),
        (None, None, "tgz.tar.gz", "tgz"),
        (None, None, "naïve", "na_ve"),
        (None, None, ".mar", "_mar"),
    ],
)
def test_a_models_name(given: str | None, manifest: str | None, file: str, expected: str) -> None:
    assert model_name_for(Requested(model_name=given), manifest, "1.0", Path("/store") / file) == expected


@pytest.mark.parametrize("name", ["a/b", "a\\b", "..", "a\nb", "a\x00", "x" * 256, "a\u2028b"])
def test_names_that_no_path_could_carry_are_refused(name: str) -> None:
    for requested, of_archive in ((Requested(model_name=name), None), (NOTHING, name)):
        with pytest.raises(InvalidArgument, match="model"):
            model_name_for(requested, of_archive, "1.0", Path("x.mar"))
    with pytest.raises(InvalidArgument, match="modelVersion"):
        model_name_for(NOTHING, "m", name, Path("x.mar"))
