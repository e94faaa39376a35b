"""Test connections: the time for headers, the limit of open files, malformed requests, and the end of the recorder."""

import asyncio
import json
import os
import signal
import socket

import httpx2 as httpx
import pytest
from recorders import Upstream, recorder, start_recorder

from topr_trl.recording import listening
from topr_trl.recording.settings import RecordArguments

HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A:"
SECRET = b"?api_key=SECRET"


@pytest.fixture(autouse=True)
def says_again():
    listening.say_once.cache_clear()


@pytest.mark.parametrize("first", [b"", HALF, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /v1"])
def test_a_connection_without_a_complete_header_is_closed(tmp_path, first):
    with recorder(tmp_path, client_timeout=0.3) as running, running.connect() as connection:
        connection.sendall(first)
        while connection.recv(1 << 16):  # A header that arrives slowly gets no more time.
            pass


def test_an_address_that_the_machine_lacks_is_skipped(monkeypatch):
    """Test a host with two addresses, such as localhost where IPv6 is off."""
    missing, own = ("2001:db8::1", 0, 0, 0), ("127.0.0.1", 0)

    async def addresses(*_, **__):
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", missing), (socket.AF_INET, socket.SOCK_STREAM, 6, "", own)]

    async def bound():
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", addresses)
        return await listening._bound(RecordArguments("http://127.0.0.1:9/v1", "log", port=0))

    (found,) = asyncio.run(bound())
    with found:
        assert found.getsockname()[0] == "127.0.0.1"


def test_long_headers(tmp_path):
    """Browsers send the cookies of all local applications."""
    long = {"Cookie": "a=" + "x" * 60_000}
    with recorder(tmp_path) as running:
        assert httpx.get(running.address, headers=long).status_code == 200
        assert len(httpx.get(f"{running.address}/v1/long").headers["x-long"]) == 60_000


def test_idle_connections_make_room_for_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(listening, "raise_file_limit", lambda: 80)  # 8 connections
    with recorder(tmp_path) as running:
        idle = [running.connect() for _ in range(20)]
        for connection in idle:
            connection.sendall(HALF)
        assert httpx.get(f"{running.address}/v1/x", timeout=5).status_code == 200
        assert sum(connection.fileno() for connection in idle) > 0
    assert capsys.readouterr().out.count("can open only 80 files") == 1


def test_the_soft_limit_of_files_is_raised(monkeypatch):
    limits = [100, 200]
    monkeypatch.setattr(listening.resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(listening.resource, "setrlimit", lambda which, new: limits.__setitem__(slice(None), new))
    assert (listening.raise_file_limit(), limits) == (200, [200, 200])
    limits[1] = listening.resource.RLIM_INFINITY
    assert (listening.raise_file_limit(), limits) == (10_240, [10_240, listening.resource.RLIM_INFINITY])


def test_a_connection_that_cannot_be_accepted_is_said_once(tmp_path, monkeypatch, capsys):
    accept, failures = socket.socket.accept, [24] * 3

    def limited(self):
        if failures:
            raise OSError(failures.pop(), "Too many open files")
        return accept(self)

    with recorder(tmp_path) as running:
        monkeypatch.setattr(socket.socket, "accept", limited)
        assert [httpx.get(f"{running.address}/v1/x").status_code for _ in range(2)] == [200, 200]
    said = capsys.readouterr().out
    assert (failures, said.count("Too many open files")) == ([], 1)


@pytest.mark.parametrize("request_", [
    b"GET /" + SECRET + b" HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET /" + SECRET + b" HTTX/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"GET / HTTP/1.1\r\nAuthorization SECRET\r\n\r\n", b"GET /?SECRET" + b"x" * 9_000 + b" HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01SECRET\r\n\r\n",
])  # fmt: skip
def test_malformed_requests_are_said_once_and_not_repeated(tmp_path, capfd, caplog, request_):
    with recorder(tmp_path) as running:
        for _ in range(2):
            with running.connect() as connection:
                connection.sendall(request_)
                found = connection.recv(1 << 16)
                while more := connection.recv(1 << 16):
                    found += more
            head, _, body = found.partition(b"\r\n\r\n")
            assert b" 400 " in head
            assert "HTTP" in json.loads(body)["error"]["message"]
            assert b"SECRET" not in body
    said = "".join(capfd.readouterr())
    assert (said.count("\n"), said.count("not valid HTTP"), "SECRET" in said + caplog.text) == (1, 1, False)


@pytest.mark.slow
@pytest.mark.processes
def test_a_second_ctrl_c_cuts_running_calls(tmp_path):
    upstream = Upstream()
    upstream.fault = "stall"
    with recorder(tmp_path / "other", upstream) as running:
        old = os.umask(0o022)
        process, address = start_recorder(running.direct, tmp_path / "log")
        os.umask(old)
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=body):
            modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "log").iterdir()}
            process.send_signal(signal.SIGINT)
            assert "1 request." in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            assert "Stopped" in process.stdout.readline()
    assert set(modes.values()) == {0o600}
    assert len(modes) == 4  # .lock, and the database with -wal and -shm
