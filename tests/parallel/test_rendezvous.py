"""Hosts wait for each other before JAX connects them, and name those that have not come."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from maxbatch.parallel import rendezvous
from maxbatch.parallel.rendezvous import Address, meet
from maxbatch.system.errors import ConfigError, TrainingError
from maxbatch.system.processes.ports import free_port


@pytest.fixture
def address() -> Address:
    return Address("localhost", free_port())


class Host(threading.Thread):
    """A host that comes to the meeting; `error` is what it raised, "" while it waits, None once all
    have come.
    """

    def __init__(self, address: Address, index: int, num_hosts: int, wait_s: float = 20.0) -> None:
        super().__init__(daemon=True)
        self._meeting = (
            address,
            index,
            num_hosts,
            wait_s,
            Address("::", address.port) if index == 0 else None,
        )
        self._address, self._listens = address, index == 0
        self.error: BaseException | str | None = ""
        self.start()

    def run(self) -> None:
        try:
            meet(*self._meeting)
        except BaseException as error:
            self.error = error
            return
        if self._listens:  # the service takes the port over
            with socket.create_server(("localhost", self._address.port)) as service:
                time.sleep(1)
                service.close()
        self.error = None

    def ended(self) -> BaseException | str | None:
        self.join(30)
        return self.error


def test_hosts_that_come_in_any_order_meet_and_leave_the_port_to_the_service(
    address: Address,
) -> None:
    hosts = []
    for index in (2, 0, 1):
        hosts.append(Host(address, index, 3))
        time.sleep(0.3)
    assert [host.ended() for host in hosts] == [None] * 3


def test_a_host_that_does_not_come_is_named_by_all_that_have(address: Address) -> None:
    hosts = [Host(address, index, 4, wait_s) for index, wait_s in ((0, 3.0), (2, 60.0))]
    for error in [host.ended() for host in hosts]:
        assert isinstance(error, TrainingError) and str(error).startswith("host 0 of 4 has waited ")
        assert " s (host_wait_s) for hosts 1, 3; " in str(error)


def test_the_first_host_that_does_not_come_is_named_with_the_place_where_it_was_looked_for(
    address: Address,
) -> None:
    error = Host(address, 1, 2, wait_s=1).ended()
    assert f"for host 0 (at {address}: connection refused); " in str(error)


def test_hosts_say_after_a_while_whom_they_wait_for_and_again(
    address: Address, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_FIRST_WORD_S", 1.0)
    monkeypatch.setattr(rendezvous, "_AGAIN_S", 1.0)
    Host(address, 0, 2, wait_s=2.5).ended()
    lines = capfd.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 3
    assert (
        lines[0]
        == "maxbatch: host 0 of 2 waits for host 1: 1 s so far, at most 2.5 s (host_wait_s)"
    )


def test_a_host_that_left_and_comes_again_is_taken(address: Address) -> None:
    first = Host(address, 0, 3)
    time.sleep(0.5)
    with socket.create_connection(address) as left:
        left.sendall(b'{"host": 1, "hosts": 3}\n')
        time.sleep(0.3)
        error = Host(address, 1, 3).ended()
    assert isinstance(error, ConfigError) and "another process is host 1 of 3 already" in str(error)
    time.sleep(0.5)  # the connection is closed: the host has left
    hosts = [first, Host(address, 1, 3), Host(address, 2, 3)]
    assert [host.ended() for host in hosts] == [None] * 3


def test_hosts_that_state_different_numbers_of_hosts_are_refused(address: Address) -> None:
    hosts = [Host(address, 0, 2), Host(address, 1, 3)]
    for host in hosts:
        error = host.ended()
        assert isinstance(error, ConfigError) and "2 on host 0, 3 on host 1" in str(error)


def test_a_port_that_is_taken_is_one_line(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_PORT_S", 0.5)
    with socket.create_server(("localhost", address.port)):
        error = Host(address, 0, 2).ended()
    assert isinstance(error, ConfigError) and f"cannot listen on [::]:{address.port}" in str(error)


@pytest.fixture
def web_server(address: Address) -> Iterator[None]:
    with http.server.HTTPServer(
        ("localhost", address.port), http.server.BaseHTTPRequestHandler
    ) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("web_server")
def test_another_program_at_the_address_is_no_host(address: Address) -> None:
    error = Host(address, 1, 2, wait_s=2).ended()
    assert isinstance(error, TrainingError) and f"for host 0 (at {address}: " in str(error)


@pytest.mark.parametrize(
    "text", ["localhost", "localhost:", "localhost:abc", "localhost:0", "localhost:70000", ":1"]
)
def test_an_address_without_a_port_number_is_refused_with_one_that_works(text: str) -> None:
    with pytest.raises(ConfigError, match=r"JAX_COORDINATOR_ADDRESS=.*; works: "):
        Address.parsed(text, "JAX_COORDINATOR_ADDRESS")
    assert Address.parsed("[::1]:8476", "X") == ("::1", 8476)
