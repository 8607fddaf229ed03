"""Front doors in the configuration: defaults, forms, and what is refused for being open to everybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from taktd.daemon.config.configuration import Configuration, ConfigurationRefused, load
from taktd.daemon.config.front_doors import is_loopback

BASE = "devices: {cpu0: {driver: cpu}}\n"


def loaded(folder: Path, text: str) -> Configuration:
    file = folder / "taktd.yaml"
    file.write_text(BASE + text, encoding="utf-8")
    return load(file)


def test_by_default_unix_sockets_and_no_http(tmp_path: Path) -> None:
    configuration = loaded(tmp_path, "")
    assert [(door.listen, door.rights, door.mode) for door in configuration.grpc] == [("unix:", "infer", "0660")]
    assert configuration.zmq.on
    assert configuration.http.listen is None


def test_all_can_be_off(tmp_path: Path) -> None:
    configuration = loaded(tmp_path, "grpc: off\nzmq: off\nhttp: off\n")
    assert configuration.grpc == ()
    assert not configuration.zmq.on
    assert configuration.http.listen is None


def test_one_listener_or_several(tmp_path: Path) -> None:
    assert len(loaded(tmp_path, "grpc: {rights: admin}\n").grpc) == 1
    text = 'grpc: [{rights: observe}, {listen: "127.0.0.1:8001", insecure: loopback}]\n'
    assert [door.listen for door in loaded(tmp_path, text).grpc] == ["unix:", "127.0.0.1:8001"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('grpc: {listen: "0.0.0.0:8001"}', "mutual TLS"),
        ('grpc: {listen: "0.0.0.0:8001", insecure: loopback}', "reachable from other machines"),
        ('grpc: {listen: "unix:relative"}', "absolute path"),
        ('grpc: {listen: "nowhere"}', "host:port"),
        ('grpc: {mode: "999"}', "octal"),
        ('grpc: {listen: "127.0.0.1:1", insecure: loopback, group: x}', "only with a unix socket"),
        ("grpc: {rights: everything}", "observe, infer, admin"),
        ('zmq: {listen: "tcp://0.0.0.0:1"}', "CURVE"),
        ('zmq: {listen: "ipc:///x"}', "tcp://host:port"),
        ('http: {listen: "0.0.0.0:9464"}', "reachable from other machines"),
        ("limits: {message: 64}", "unit"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigurationRefused) as refused:
        loaded(tmp_path, text + "\n")
    assert words in str(refused.value)
    assert "taktd.yaml:2" in str(refused.value)


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "")))
