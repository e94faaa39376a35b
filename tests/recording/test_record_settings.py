"""Test the settings of `topr record`."""

import asyncio
import socket

import pytest
from recorders import recorder

from topr_trl.cli import main
from topr_trl.recording.server import _check_server, connections
from topr_trl.recording.settings import RecordArguments

URL = "http://127.0.0.1:8000/v1"


@pytest.mark.parametrize(("settings", "field"), [
    ({"upstream": "localhost:8000"}, "upstream"), ({"upstream": "http://me:key@h/v1"}, "TOPR_UPSTREAM_KEY"),
    ({"port": 70_000}, "port"), ({"token_ids": "yes"}, "token_ids"),
    ({"on_full": "stop"}, "on_full"), ({"redact": ["("]}, "redact"), ({"max_body_mb": 0}, "max_body_mb"),
    ({"max_answer_mb": 0}, "max_answer_mb"), ({"client_timeout": 0.0}, "client_timeout"),
    ({"upstream_timeout": -1.0}, "upstream_timeout"), ({"host": "0.0.0.0"}, "TOPR_RECORD_TOKEN"),
    ({"host": "my-machine"}, "TOPR_RECORD_TOKEN"), ({"port": "9000"}, "port"),
])  # fmt: skip
def test_settings_that_cannot_be_used(settings, field, monkeypatch):
    monkeypatch.delenv("TOPR_RECORD_TOKEN", raising=False)
    with pytest.raises((ValueError, TypeError), match=field):
        RecordArguments(**{"upstream": URL, "output_dir": "log", **settings})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_local_hosts_need_no_token(host, monkeypatch):
    monkeypatch.delenv("TOPR_RECORD_TOKEN", raising=False)
    RecordArguments(URL, "log", host)


def test_one_recorder_per_folder(tmp_path):
    from filelock import FileLock

    with FileLock(tmp_path / ".lock"), pytest.raises(ValueError, match="output_dir"):
        main.main(["record", "--upstream", URL, "--output_dir", str(tmp_path)])


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port}: Address already in use. Set a different port"):
            main.main(["record", "--upstream", URL, "--output_dir", str(tmp_path), "--port", str(port)])


def test_a_server_that_does_not_answer_is_noted(tmp_path, capsys, monkeypatch):
    args = RecordArguments("http://127.0.0.1:9/v1", str(tmp_path))

    async def check(args):
        async with connections(args) as session:
            await _check_server(args, session)

    asyncio.run(check(args))
    assert "cannot be reached yet" in capsys.readouterr().out
    with recorder(tmp_path / "log") as running:
        asyncio.run(check(RecordArguments(running.address, str(tmp_path))))
        assert "/v1" in capsys.readouterr().out
        asyncio.run(check(RecordArguments(f"{running.direct}/v1", str(tmp_path))))
        assert capsys.readouterr().out == ""
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", running.direct)  # It answers for the name, which does not exist.
        asyncio.run(check(RecordArguments("http://model.invalid/v1", str(tmp_path))))
        assert capsys.readouterr().out == ""
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for this machine
        asyncio.run(check(RecordArguments(f"{running.direct}/v1", str(tmp_path))))
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "upstream", ["user:SECRET@host:8000/v1", "ftp://user:SECRET@host/v1", "http://user:SECRET@host/v1"]
)
def test_an_error_does_not_repeat_the_password_of_a_url(tmp_path, upstream):
    with pytest.raises(ValueError, match="upstream must be a URL") as raised:
        RecordArguments(upstream, str(tmp_path))
    assert "SECRET" not in str(raised.value)
