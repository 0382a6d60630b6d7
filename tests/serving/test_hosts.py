"""The names that `kvpolicy serve` answers to: a web page whose name was made to point here is refused."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

import kvpolicy
from kvpolicy.serving.access import Hosts
from tests.serving.servers import ask, running


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with running(kvpolicy.tiny(), allowed_hosts=("gpu-box.example.com",)) as number:
        yield number


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/completions", "/none"])
def test_another_name_is_refused_for_every_path(path: str, port: int) -> None:
    body = json.dumps({"prompt": "tiger=4821\n?tiger=", "max_tokens": 1}).encode() if "comp" in path else None
    status, answer = ask(port, "POST" if body else "GET", path, body, ("Host", "rebound.example:8000"))
    assert status == 403
    assert answer["error"] == {
        "message": "The Host header must be a name or an address of this server, got 'rebound.example:8000'; try "
        "starting kvpolicy serve with --allowed-hosts and this name.",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


def test_the_names_of_the_server(port: int) -> None:
    for host in (f"127.0.0.1:{port}", "localhost", "LOCALHOST.:80", "[::1]:80", "gpu-box.example.com:8443"):
        assert ask(port, "GET", "/health", None, ("Host", host))[0] == 200
    for host in ("", ":80", "localhost.example.com", "127.0.0.1.example.com", "box.gpu-box.example.com", "10.0.0.5"):
        assert ask(port, "GET", "/health", None, ("Host", host))[0] == 403
    assert ask(port, "GET", "/health", None, ("Host", "x" * 999))[1]["error"]["message"].count("x") == 60


ADDRESSES = ("10.0.0.5:80", "[fe80::1]:80", "[FE80:0::1]", "localhost", socket.gethostname())
NO_ADDRESSES = (None, "", "example.com", "10.0.0.5.example.com", "10.0.0.5:80:80", "[fe80::1", "[example.com]", "[]")


@pytest.mark.parametrize(
    ("address", "names", "allowed", "refused"),
    [
        ("0.0.0.0", [""], (*ADDRESSES, "0.0.0.0"), NO_ADDRESSES),
        ("::", [""], (*ADDRESSES, "[::]"), NO_ADDRESSES),
        ("fe80::1%eth0", ["Box"], ("[fe80::1]:8000", "box:8000"), ("[fe80::2]:8000", "10.0.0.5")),
        ("127.0.0.1", ["*"], ("example.com", None), ()),
    ],
    ids=["all", "all of IPv6", "one interface", "any name"],
)
def test_a_server_answers_to_its_addresses_and_names(address: str, names: Any, allowed: Any, refused: Any) -> None:
    hosts = Hosts(address, names)
    assert all(hosts.allows(header) for header in allowed)
    assert not any(hosts.allows(header) for header in refused)


def test_a_request_has_one_host(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        with connection.makefile() as reader:
            assert "got none; try" in reader.read()


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/v1/completions", 405, "POST"),
        ("POST", "/v1/models", 405, "GET"),
        ("GET", "/v1/none", 404, None),
        ("HEAD", "/health", 200, None),
    ],
)
def test_methods_of_paths(method: str, path: str, status: int, allowed: str | None, port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        assert (response.status, response.getheader("Allow")) == (status, allowed)
        text = response.read()
        assert status == 200 or "The path must be" in json.loads(text)["error"]["message"]
    finally:
        connection.close()
