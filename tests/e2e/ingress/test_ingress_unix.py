"""Unix sockets: the permission to connect, and the life of the file."""

from __future__ import annotations

import os
import socket
import stat
import threading

import grpc
import pytest

from support import GUARD_S


@pytest.fixture
def path(tmp_path_factory):
    """A short one: the system allows some hundred bytes, and pytest's folders for one test take most of them."""
    folder = tmp_path_factory.mktemp("u")
    return folder / "s"


def call(connect, path, data=b"x"):
    return connect(0, address=f"unix:{path}").unary("Unary", data)


def test_a_unix_socket(run_server, connect, path):
    with run_server({"name": "unix", "path": str(path)}) as server:
        assert server.port == 0
        assert call(connect, path, bytes(3_000_000)) == bytes(3_000_000)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        server.drain(0)
        assert server.end()[1] == 0
        assert not path.exists()


def test_its_mode_whatever_the_umask(run_server, connect, path):
    before = os.umask(0o077)
    try:
        with run_server({"name": "unix", "path": str(path), "path_mode": 0o666}):
            assert stat.S_IMODE(path.stat().st_mode) == 0o666
    finally:
        os.umask(before)


def test_a_socket_that_nobody_listens_on_makes_room(run_server, connect, path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.is_socket()
    with run_server({"name": "unix", "path": str(path)}):
        assert call(connect, path) == b"x"


def test_a_socket_that_somebody_listens_on_stays(run_server, start_server, connect, path):
    with run_server({"name": "first", "path": str(path)}):
        error = start_server({"name": "second", "path": str(path)})["error"]
        assert error == f"second: cannot listen on {path}: another server listens there"
        assert call(connect, path) == b"x"


@pytest.mark.parametrize("kind_of_file", ["file", "directory", "link"])
def test_other_files_stay(start_server, path, kind_of_file):
    other = path.with_name("other")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(other))
    {"file": path.touch, "directory": path.mkdir, "link": lambda: path.symlink_to(other)}[kind_of_file]()
    error = start_server({"name": "unix", "path": str(path)})["error"]
    assert "isn't a socket" in error and str(path) in error
    assert os.path.lexists(path) and other.is_socket()


def test_a_directory_that_is_missing(start_server, path):
    error = start_server({"name": "unix", "path": str(path / "no" / "s")})["error"]
    assert f"{path / 'no'}: No such file or directory" in error


def test_a_file_that_another_one_replaced_stays(run_server, path):
    """Whoever deletes the socket and puts something in its place keeps that."""
    with run_server({"name": "unix", "path": str(path)}) as server:
        path.unlink()
        path.write_text("mine")
        server.drain(0)
        assert server.end()[1] == 0
    assert path.read_text() == "mine"


def test_a_killed_server_leaves_no_obstacle(run_server, connect, path):
    with run_server({"name": "unix", "path": str(path)}) as server:
        server.process.kill()
        server.process.wait(GUARD_S)
        assert path.is_socket()
    with run_server({"name": "unix", "path": str(path)}):
        assert call(connect, path) == b"x"


def test_servers_that_start_at_once(start_server, connect, path):
    """Of many on a socket that was left behind one gets it, and the others are told."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    said: list[dict[str, object]] = []
    threads = [
        threading.Thread(target=lambda: said.append(start_server({"name": "unix", "path": str(path)})))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
    assert sorted("ports" in one for one in said) == [False, False, False, True], said
    assert call(connect, path) == b"x"


def test_a_drain_ends_calls(run_server, connect, path):
    with run_server({"name": "unix", "path": str(path)}) as server:
        client = connect(0, address=f"unix:{path}")
        hanging = client.start_unary("Hang", b"long")
        client.wait("long started")
        server.drain(0.1)
        with pytest.raises(grpc.RpcError) as caught:
            hanging.result(GUARD_S)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert server.end()[1] == 0
        assert not path.exists()
