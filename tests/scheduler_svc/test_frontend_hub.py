"""The scheduler's buffers for its front ends are bounded, with real sockets."""

import time
from pathlib import Path

import pytest
import zmq

from protos.quire.link.v1 import link_pb2
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.frontend import hub as frontend_hub
from scheduler_svc.frontend.hub import FrontendHub
from scheduler_svc.service import SchedulerService
from shared.config import SchedulerConfig
from shared.frames import LINK_MAX_MESSAGE
from shared.sockets import connect_dealer, receive_from
from shared.telemetry import Telemetry

STATE = ef.ServiceChanged(ready=True, model=None, max_model_len=0, block_size=0, max_call_requests=0, max_call_tokens=0)


def test_a_front_end_that_talks_and_never_reads_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports renew the lease.

    Responses pile up only to a limit, and only for the front end that does not read them.
    """
    monkeypatch.setattr(frontend_hub, "MAX_BACKLOG", 1 << 16)
    address = f"ipc://{tmp_path}/f"
    with zmq.Context() as context:
        hub = FrontendHub(context, address, incarnation=1, lease_s=10.0)
        dealers = [
            connect_dealer(context, address, identity=name, max_message=LINK_MAX_MESSAGE) for name in (b"a", b"b")
        ]
        for dealer in dealers:
            dealer.send(b"")
        for _ in dealers:
            assert hub.socket.poll(20_000)
            peer, _ = receive_from(hub.socket) or (b"", b"")
            hub.heard(peer, 0.0, version=1)
        lost: dict[bytes, str] = {}
        for turn in range(100_000):
            for peer in (b"a", b"b"):
                hub.heard(peer, float(turn))
                hub.outgoing(peer).set_state(STATE, "")
            lost = hub.flush()
            if lost:
                break
            assert dealers[1].poll(20_000)
            while dealers[1].poll(0):
                dealers[1].recv()
        expired = hub.expired(float(turn))
        hub.forget(b"a", lost[b"a"])
        hub.outgoing(b"b").set_snapshot(7, [])

        assert (lost, expired) == ({b"a": f"it does not read: more than {1 << 16} bytes wait to be sent"}, [])
        assert hub.flush() == {}
        while link_pb2.CoreMessage.FromString(dealers[1].recv()).snapshot.request != 7:
            pass
        for socket in (*dealers, hub.socket):
            socket.close()


def test_a_front_end_whose_reports_wait_behind_its_submissions_still_hears_from_the_core(tmp_path: Path) -> None:
    """A front end that got nothing for over a second gets the state."""
    with zmq.Context() as context:
        hub = FrontendHub(context, f"ipc://{tmp_path}/f", incarnation=1, lease_s=10.0)
        now = time.monotonic()
        hub.heard(b"a", now, version=1)

        assert list(hub.neglected(now + 1.0)) == []
        assert len(list(hub.neglected(now + 1.5))) == 1
        assert list(hub.neglected(now + 2.0)) == []
        hub.socket.close()


def test_a_front_end_is_not_silent_while_its_frames_wait_for_the_scheduler(tmp_path: Path) -> None:
    """Its lease counts until all frames that had arrived were read, because a busy scheduler may read them late."""
    config = SchedulerConfig(frontend_address=f"ipc://{tmp_path}/f", worker_address=f"ipc://{tmp_path}/w")
    telemetry = Telemetry("test")
    service = SchedulerService(config, telemetry, 1)
    now = time.monotonic()
    service._frontends.heard(b"f/1", now, version=1)
    later = now + config.frontend_lease_s + 1.0

    service._tick(later)
    assert b"f/1" in service._frontends

    service._read_all_at = later
    service._tick(later)
    assert b"f/1" not in service._frontends
    service.close()
    telemetry.shutdown()


def test_a_front_end_that_hangs_is_dropped_although_frames_of_others_always_wait(tmp_path: Path) -> None:
    """An overloaded scheduler may never read all frames. The requests of a front end that hangs would never end."""
    config = SchedulerConfig(frontend_address=f"ipc://{tmp_path}/f", worker_address=f"ipc://{tmp_path}/w")
    telemetry = Telemetry("test")
    service = SchedulerService(config, telemetry, 1)
    now = time.monotonic()
    service._frontends.heard(b"hangs/1", now, version=1)
    later = now + 10 * config.frontend_lease_s
    service._frontends.heard(b"busy/1", later, version=1)

    service._tick(later)

    assert b"hangs/1" not in service._frontends
    assert b"busy/1" in service._frontends
    service.close()
    telemetry.shutdown()
