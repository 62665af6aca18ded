"""The pure parts of keeping workers: when to restart, on which device, how an end reads."""

from __future__ import annotations

import pytest

from ts_frontend.workers.devices import CPU, Inventory, Placement
from ts_frontend.workers.failures import Backoff
from ts_frontend.workers.process import ExitStatus


def delays(backoff: Backoff, count: int, chance: float = 0.0) -> list[float]:
    out = []
    for number in range(count):
        backoff.failed(float(number))
        out.append(backoff.delay_s(chance))
    return out


def test_the_first_restart_is_at_once_then_the_delay_doubles_up_to_its_cap():
    assert delays(Backoff(300), 10) == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_chance_shortens_a_delay_by_at_most_a_half():
    assert delays(Backoff(300), 3, chance=0.999)[2] == pytest.approx(0.5, abs=0.001)


def test_a_life_that_answered_something_starts_the_count_again():
    backoff = Backoff(300)
    delays(backoff, 5)
    backoff.worked()
    assert delays(backoff, 2) == [0.0, 0.5]


def test_it_gives_up_when_it_has_failed_for_too_long():
    backoff = Backoff(10)
    backoff.failed(100.0)
    assert not backoff.exhausted(110.0)
    assert backoff.exhausted(110.5)


def test_models_without_device_ids_share_one_turn_that_begins_with_the_second_device():
    placement = Placement(Inventory("cuda", 3))
    a, b = object(), object()
    got = [placement.next(model, "", ()).gpu_id for model in (a, b, a, a)]
    assert got == [1, 2, 0, 1]


def test_a_model_with_device_ids_has_its_own_turn_from_the_first():
    placement = Placement(Inventory("cuda", 4))
    model = object()
    assert [placement.next(model, "gpu", (3, 1)).gpu_id for _ in range(3)] == [3, 1, 3]
    assert placement.next(object(), "gpu", ()).gpu_id == 1


def test_an_id_that_does_not_exist_makes_the_list_count_for_nothing():
    placement = Placement(Inventory("cuda", 2))
    assert [placement.next(object(), "", (0, 2)).gpu_id for _ in range(2)] == [1, 0]


def test_cpu_when_asked_for_or_when_there_is_nothing_else():
    assert Placement(Inventory("cuda", 2)).next(object(), "cpu", (0,)) == CPU
    assert Placement(Inventory()).next(object(), "gpu", (0,)) == CPU


def test_apple_devices_keep_their_kind():
    device = Placement(Inventory("mps", 1)).next(object(), "", ())
    assert (device.kind, device.gpu_id) == ("mps", 0)


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "exit code 3"), (-9, "killed by SIGKILL (out of memory?)"), (-11, "killed by SIGSEGV"), (None, "unknown")],
)
def test_how_a_process_ended_reads_like_a_sentence(code, words):
    assert words in ExitStatus(code).sentence()
    assert ExitStatus(code).by_sigkill is (code == -9)
