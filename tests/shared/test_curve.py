"""Keys between processes: only listed peers are accepted, and others neither send nor receive a byte."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from quire_server.cli.keys import add, create, revoke, rotate
from shared.config import ConfigError
from shared.curve import (
    ALLOWED,
    DOMAINS,
    FRONTEND,
    SCHEDULER,
    WORKER,
    AllowList,
    CurveKeys,
    check_bind,
    is_routable,
    load_keys,
)
from shared.sockets import bind_router, connect_dealer, endpoint, receive_from

WAIT_MS = 10_000
SILENCE_MS = 700


class Door:
    """A scheduler's socket for workers, protected by the keys of a folder."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = _keys(folder, SCHEDULER)
        self._allowed = AllowList(self.context, keys)
        self.router = bind_router(
            self.context,
            "tcp://127.0.0.1:*",
            max_message=1 << 20,
            protect=lambda socket: keys.protect_server(socket, DOMAINS[WORKER]),
        )

    def lets_in(self, keys: CurveKeys | None, name: str) -> bool:
        """Return whether a peer with these keys can send a frame."""
        protect = (lambda _socket: None) if keys is None else keys.protect_client
        peer = connect_dealer(
            self.context, endpoint(self.router), identity=name.encode(), max_message=1 << 20, protect=protect
        )
        wait_ms = SILENCE_MS if keys is None or "stranger" in name else WAIT_MS
        # A peer with a refused handshake has no connection to send on.
        came = bool(peer.poll(wait_ms, zmq.POLLOUT))
        if came:
            peer.send(b"let me in")
            came = bool(self.router.poll(wait_ms))
        if came:
            assert receive_from(self.router) == (name.encode(), b"let me in")
        peer.close(linger=0)
        return came

    def refresh(self) -> None:
        """Reads the list again, now."""
        self._allowed._next_check = 0.0
        self._allowed.refresh()

    def close(self) -> None:
        """Close the sockets."""
        self.router.close()
        self._allowed.close()
        self.context.destroy(linger=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with keys."""
    create(tmp_path)
    return tmp_path


@pytest.fixture
def door(folder: Path) -> Iterator[Door]:
    """Yield a socket that accepts the listed keys."""
    door = Door(folder)
    yield door
    door.close()


def _keys(folder: Path, role: str) -> CurveKeys:
    keys = load_keys(str(folder), role)
    assert keys is not None
    return keys


def test_only_listed_workers_are_accepted(door: Door, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A listed worker connects; no keys, unknown keys and a front end's keys are refused."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    create(elsewhere)
    forged = _keys(elsewhere, WORKER)
    (elsewhere / WORKER / "scheduler.key").write_text((folder / WORKER / "scheduler.key").read_text())

    assert door.lets_in(_keys(folder, WORKER), "worker")
    assert not door.lets_in(None, "stranger without keys")
    assert not door.lets_in(forged, "stranger with keys")
    assert not door.lets_in(_keys(folder, FRONTEND), "stranger: a front end")


def test_a_scheduler_without_the_secret_key_gets_no_message(
    door: Door, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A worker sends nothing to a peer that does not hold the scheduler's secret key."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    create(elsewhere)
    (folder / WORKER / "scheduler.key").write_text((elsewhere / SCHEDULER / "own.key").read_text())

    assert not door.lets_in(_keys(folder, WORKER), "stranger to this scheduler")


def test_keys_are_added_rotated_and_revoked_while_it_serves(door: Door, folder: Path) -> None:
    """A new worker is accepted; after a rotation both its keys are, until the old one, or all, are revoked."""
    add(folder, "gpu-7", WORKER)
    door.refresh()
    old = _keys(folder / "gpu-7", WORKER)
    assert door.lets_in(old, "gpu-7")

    rotate(folder, "gpu-7")
    door.refresh()
    new = _keys(folder / "gpu-7", WORKER)
    assert new.public != old.public
    assert door.lets_in(old, "gpu-7 with its old key")
    assert door.lets_in(new, "gpu-7 with its new key")

    revoke(folder, "gpu-7", only_old=True)
    door.refresh()
    assert not door.lets_in(old, "stranger now")
    assert door.lets_in(new, "gpu-7 again")

    revoke(folder, "gpu-7", only_old=False)
    door.refresh()
    assert not door.lets_in(new, "stranger as well")


def test_a_list_that_cannot_be_read_stays_as_it_was(door: Door, folder: Path) -> None:
    """While the folder of allowed keys is replaced, the previous keys are accepted; then the new list applies."""
    add(folder, "gpu-7", WORKER)
    keys = _keys(folder / "gpu-7", WORKER)
    door.refresh()
    allowed = folder / SCHEDULER / ALLOWED
    allowed.rename(folder / "away")
    door.refresh()
    assert door.lets_in(keys, "gpu-7")

    (folder / "away").rename(allowed)
    revoke(folder, "gpu-7", only_old=False)
    door.refresh()
    assert not door.lets_in(keys, "stranger now")


def test_secret_keys_are_for_their_owner_alone(folder: Path) -> None:
    """Secret keys are written unreadable for others, and not taken when others can read them."""
    secret = folder / WORKER / "own.key_secret"
    assert secret.stat().st_mode & 0o077 == 0
    secret.chmod(0o644)

    with pytest.raises(ConfigError, match="is readable by other users"):
        load_keys(str(folder), WORKER)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://eth0:1", "tcp://[::]:1", "0.0.0.0", "::"])
def test_an_open_address_without_keys_is_refused(address: str) -> None:
    """An address that other machines can reach needs keys, or an explicit setting."""
    assert is_routable(address)
    with pytest.raises(ConfigError, match="--insecure"):
        check_bind("worker_address", address, protected=False, insecure=False)
    check_bind("worker_address", address, protected=True, insecure=False)
    check_bind("worker_address", address, protected=False, insecure=True)


@pytest.mark.parametrize("address", ["ipc:///tmp/x", "tcp://127.0.0.1:1", "tcp://[::1]:1", "127.0.0.1", "localhost"])
def test_addresses_on_this_machine_need_no_keys(address: str) -> None:
    """Loopback and Unix sockets are the default."""
    check_bind("host", address, protected=False, insecure=False)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to root and to another group")
def test_a_secret_of_root_for_a_group_of_the_process_is_accepted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes mounts a secret as root:fsGroup with mode 0440; a stranger's group and other users stay refused."""
    secret = folder / WORKER / "own.key_secret"
    os.chown(secret, 0, 10001)
    monkeypatch.setattr(os, "getgroups", lambda: [10001])
    secret.chmod(0o440)

    assert load_keys(str(folder), WORKER) is not None
    for mode, groups in ((0o444, [10001]), (0o460, [10001]), (0o440, [10002])):
        secret.chmod(mode)
        monkeypatch.setattr(os, "getgroups", lambda found=groups: found)
        with pytest.raises(ConfigError, match="is readable by other users"):
            load_keys(str(folder), WORKER)
