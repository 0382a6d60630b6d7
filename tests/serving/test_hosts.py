"""The names that `kvpolicy serve` answers to: a web page whose name was made to point here is refused."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator

import pytest

import kvpolicy
from kvpolicy.cli.app import main
from kvpolicy.serving.access import Hosts, check_names
from tests.serving.servers import POLICY, ask, running


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


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_a_server_for_all_interfaces_answers_to_addresses_and_its_name(address: str) -> None:
    hosts = Hosts(address, [""])
    for header in ("10.0.0.5:80", "[fe80::1]:80", "[FE80:0::1]", "localhost", socket.gethostname(), address):
        assert hosts.allows(header if header != "::" else "[::]")
    for header in (
        None,
        "",
        "example.com",
        "10.0.0.5.example.com",
        "10.0.0.5:80:80",
        "[fe80::1",
        "[example.com]",
        "[]",
    ):
        assert not hosts.allows(header)


def test_an_interface_has_its_own_address_alone() -> None:
    hosts = Hosts("fe80::1%eth0", ["Box"])
    assert hosts.allows("[fe80::1]:8000") and hosts.allows("box:8000")
    assert not hosts.allows("[fe80::2]:8000") and not hosts.allows("10.0.0.5")
    assert Hosts("127.0.0.1", ["*"]).allows("example.com")
    assert Hosts("127.0.0.1", ["*"]).allows(None)


def test_a_request_has_one_host(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        with connection.makefile() as reader:
            assert "got none; try" in reader.read()


@pytest.mark.parametrize("names", ["http://gpu-box", "gpu-box:80", "a,,b", "*.example.com", "-x", "a b"])
def test_a_wrong_name_is_refused_before_the_model_is_loaded(names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "none/none", POLICY, f"--allowed-hosts={names}"]) == 2
    assert "--allowed-hosts must be names or addresses without ports" in capsys.readouterr().err


def test_a_policy_is_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", POLICY]) == 2
    assert f"got the policy {POLICY!r}; try kvpolicy serve MODEL {POLICY}." in capsys.readouterr().err


def test_right_names() -> None:
    names = ["gpu-box", "gpu_box.example.com.", "10.0.0.5", "fe80::1", "[fe80::1]", "*"]
    assert check_names(names) == names


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
