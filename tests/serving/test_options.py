"""Options of `kvpolicy serve` that are refused in one sentence, before a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

import kvpolicy
from kvpolicy.cli.app import main
from kvpolicy.cli.model_loading import load
from kvpolicy.serving.access import check_names
from kvpolicy.serving.prefix import check_together
from tests.serving.servers import POLICY

NO_HOST = "--allowed-hosts must be names or addresses without ports"
NO_ADDRESS = "--host and --port must be an address that is free, got"
NO_BYTES = "must be a number of bytes with a unit, got"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prefix", "none.safetensors", "--prefix-caching", "1MiB"], "--prefix-caching must be without --prefix"),
        (
            ["--prefix", "none.safetensors", "--share-prefix", "--rows", "3"],
            "--share-prefix must be without --rows, got 3 rows",
        ),
        (["--prefix-caching", "1MiB", "--hold-codes"], "--prefix-caching must be without --hold-codes"),
        (["--share-prefix"], "--share-prefix must be given with --prefix"),
        (["--tp", "2"], "--tp must be the number of processes that a launcher started, got 2 and 1; try torchrun"),
        (["--tp", "2", "--compile"], "--compile must be without --tp, got it with 2 ranks"),
        (["--tp", "2", "--prefix-caching", "1MiB"], "--prefix-caching must be without --tp"),
        (["--tp", "2", "--prefix", "none.safetensors"], "A cache file must exist, got 'none-00001-of-00002"),
        (["--tp", "2", "--device", "cpu"], "--device must be without --tp"),
        (["--memory", "lots"], f"--memory {NO_BYTES} 'lots'; try 4GiB."),
        (["--memory", "0.2"], f"--memory {NO_BYTES} '0.2'; try 4GiB."),
        (["--prefix-caching", "0"], f"--prefix-caching {NO_BYTES} '0'; try 4GiB."),
        (["--api-key="], "--api-key must not be empty, got ''; try it without"),
        *((["--host", host], NO_ADDRESS) for host in ("", "a..b", "x" * 300)),
        *(
            ([f"--allowed-hosts={names}"], NO_HOST)
            for names in ("http://gpu-box", "gpu-box:80", "a,,b", "*.example.com", "-x", "a b")
        ),
    ],
)
def test_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> Any:
        raise AssertionError("it is refused first")

    monkeypatch.setattr("kvpolicy.cli.model_loading.load", load)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["serve", "tiny", POLICY, *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("key", ["secret\n", " secret", "secret\nlines"])
def test_a_key_that_no_client_can_send_is_refused(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As from a file that ends with a line break; and it is not shown."""
    monkeypatch.setenv("KVPOLICY_API_KEY", key)
    assert main(["serve", "tiny", POLICY, "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "--api-key must be printable characters without spaces around them" in said and "secret" not in said


def test_a_policy_is_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", POLICY]) == 2
    assert f"got the policy {POLICY!r}; try kvpolicy serve MODEL {POLICY}." in capsys.readouterr().err


def test_the_embedded_model_is_on_one_rank() -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match="--tp must be 1 for the embedded model, got 2"):
        load("tiny", tp=2)


def test_rows_that_follow_from_a_memory_exclude_a_shared_prefix() -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match="got 3 rows, of which each has a copy of the prefix"):
        check_together(prefix=True, shared=True, caching=False, rows=3)
    check_together(prefix=True, shared=True, caching=False, rows=1)


def test_right_names() -> None:
    names = ["gpu-box", "gpu_box.example.com.", "10.0.0.5", "fe80::1", "[fe80::1]", "*"]
    assert check_names(names) == names
