"""`python -m ts.compat.install`: the files that it writes, and those that it leaves alone."""

from __future__ import annotations

import os
from pathlib import Path

from ts.compat import SHIMS
from ts.compat.install import COMMAND, NAME, main


def test_the_path_file_and_the_command_come_and_go(tmp_path: Path) -> None:
    assert main([], tmp_path, tmp_path) == 0
    assert (tmp_path / NAME).read_text() == SHIMS + "\n"
    assert os.access(tmp_path / COMMAND, os.X_OK) and "mlserver.cli.main" in (tmp_path / COMMAND).read_text()
    assert main(["--remove"], tmp_path, tmp_path) == 0
    assert not list(tmp_path.iterdir())


def test_a_command_of_the_real_package_stays(tmp_path: Path) -> None:
    (tmp_path / COMMAND).write_text("theirs")
    assert main([], tmp_path, tmp_path) == main(["--remove"], tmp_path, tmp_path) == 0
    assert (tmp_path / COMMAND).read_text() == "theirs"
