"""The server's directory for models: deleted at its end, or by the next server when it was killed."""

from __future__ import annotations

import os

from ts_frontend.work_dir import AGE_S_MIN, PREFIX, work_dir


def test_it_is_there_as_long_as_the_server(tmp_path):
    with work_dir(tmp_path) as path:
        (path / "models").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_is_deleted_and_nothing_else(tmp_path):
    old, young, other, linked = (tmp_path / name for name in (f"{PREFIX}old", f"{PREFIX}young", "other", "linked"))
    for path in (old, young, other, linked):
        path.mkdir()
        (path / "model").write_text("weights")
    link = tmp_path / f"{PREFIX}link"
    link.symlink_to(linked)
    with work_dir(tmp_path) as held:
        for path in (old, other, linked, held):
            os.utime(path, (0, os.stat(path).st_mtime - 2 * AGE_S_MIN))
        with work_dir(tmp_path) as second:
            assert sorted(tmp_path.iterdir()) == sorted([young, other, linked, link, held, second])
    assert (linked / "model").exists()
