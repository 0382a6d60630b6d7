"""Who may ask: the names that the server answers to, and its key.

A web page may let its own name resolve to the address of a local server, and then reads what the server answers ("DNS
rebinding"). The browser sends the page's name in the `Host` header, by which the server can tell.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from kvpolicy.serving.answers import error_body
from kvpolicy.text.errors import KVPolicyError

ANY = "*"
"""Stands for every name."""

_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?")
_HEADER = re.compile(r"(?P<host>\[[^\[\]]*\]|[^\[\]:]*)(?::[0-9]*)?")


class Hosts:
    """The names and addresses that a `Host` header may have.

    Args:
        address: The numeric address that the server listens on.
        allowed: More names and addresses, or `*` for every one.

    Examples:
        >>> hosts = Hosts("127.0.0.1", ["gpu-box"])
        >>> [hosts.allows(name) for name in ("localhost:8000", "GPU-box", "[::1]:80", "example.com", "10.0.0.5")]
        [True, True, True, False, False]
        >>> Hosts("0.0.0.0").allows("10.0.0.5:8000")
        True
    """

    def __init__(self, address: str, allowed: Iterable[str] = ()) -> None:
        """The names of a server, which are looked up once."""
        own = ["localhost", "127.0.0.1", "::1", address.partition("%")[0]]
        # An address in the header is no name that a page could have let point here.
        self._any_address = ipaddress.ip_address(own[-1]).is_unspecified
        if self._any_address:
            own += [socket.gethostname(), socket.getfqdn()]
        self._allowed = {_canonical(name) for name in (*own, *allowed) if name}

    def allows(self, header: str | None) -> bool:
        """Whether the server answers to a `Host` header; None for a request without one, or with several."""
        if ANY in self._allowed:
            return True
        match = None if header is None else _HEADER.fullmatch(header)
        if match is None:
            return False
        host = _canonical(match["host"])
        return host in self._allowed or (self._any_address and _address(host) is not None)


def check_names(names: Sequence[str]) -> Sequence[str]:
    """Return the names of `--allowed-hosts`, if all of them are names or addresses.

    Args:
        names: The names.

    Raises:
        KVPolicyError: If one is something else, such as a URL.
    """
    for name in names:
        found = _canonical(name)
        if found != ANY and _address(found) is None and not _NAME.fullmatch(found):
            raise KVPolicyError(
                f"--allowed-hosts must be names or addresses without ports, separated by commas, got {name!r}; try "
                "gpu-box.example.com,10.0.0.5."
            )
    return names


class KeyCheck:
    """Middleware that refuses requests to `/v1` without the server's key.

    Args:
        app: The app.
        key: The key.
    """

    def __init__(self, app: Any, key: str) -> None:
        """Stand before an app."""
        self._app = app
        self._wanted = b"Bearer " + key.encode("utf-8")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._wanted):
                message = "The Authorization header must be 'Bearer' and the key of this server, got another."
                await JSONResponse(error_body(message, 401, "invalid_api_key"), 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class HostCheck:
    """Middleware that refuses requests for other names than those of the server.

    Starlette's `TrustedHostMiddleware` knows neither addresses in general nor the form of this server's errors, and
    older versions of it cut IPv6 addresses at their first colon.

    Args:
        app: The app.
        hosts: The names.
    """

    def __init__(self, app: Any, hosts: Hosts) -> None:
        """Stand before an app."""
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] in ("http", "websocket"):
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            header = given[0] if len(given) == 1 else None
            if not self._hosts.allows(header):
                await _refusal(given)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refusal(given: list[str]) -> JSONResponse:
    got = " and ".join(repr(host[:60]) for host in given[:2]) or "none"
    message = (
        f"The Host header must be a name or an address of this server, got {got}; try starting kvpolicy serve with "
        "--allowed-hosts and this name."
    )
    return JSONResponse(error_body(message, 403), status_code=403)


def _canonical(name: str) -> str:
    """A name or an address in the one form in which they are compared."""
    found = name.strip().lower()
    address = _address(found.removeprefix("[").removesuffix("]"))
    return found.removesuffix(".") if address is None else str(address)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
