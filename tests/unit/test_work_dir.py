"""The server's directory for models: deleted at its end, or by the next server when it was killed."""

from __future__ import annotations

import os

from ts_frontend.models.extraction import NEW, NEW_S_MAX, PREFIX, remove_abandoned, work_dir


def test_it_is_there_as_long_as_the_server(tmp_path):
    with work_dir(tmp_path) as path:
        (path / "models").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_is_deleted_at_once_and_nothing_else(tmp_path, caplog):
    """One that was killed a moment ago, too; a name that only says that a server is about to lock it counts a while."""
    left, new, old_new, other, linked = (
        tmp_path / name for name in (f"{PREFIX}left", f"{NEW}young", f"{NEW}old", "other", "linked")
    )
    for path in (left, new, old_new, other, linked):
        path.mkdir()
        (path / "model").write_text("weights")
    link = tmp_path / f"{PREFIX}link"
    link.symlink_to(linked)
    os.utime(old_new, (0, os.stat(old_new).st_mtime - 2 * NEW_S_MAX))
    with work_dir(tmp_path) as held:
        (held / "model").write_text("weights")
        with work_dir(tmp_path) as second:
            with caplog.at_level("INFO"):
                remove_abandoned(tmp_path)
                remove_abandoned(tmp_path)  # there is nothing more to say
            (said,) = caplog.messages
            assert said == f"Removed from {tmp_path} what killed servers left: {left.name}, {old_new.name}"
            assert sorted(tmp_path.iterdir()) == sorted([new, other, linked, link, held, second])
        assert (held / "model").exists()
    assert (linked / "model").exists()
