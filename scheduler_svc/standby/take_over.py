"""The operator's command: makes a standby lead."""

import time

import zmq

from protos.quire.journal.v1.replication_pb2 import PeerMessage, TakeOver
from scheduler_svc.standby.peers import PeerLink
from shared.config import ConfigError
from shared.curve import SCHEDULER, load_keys

_TIMEOUT_S = 30.0
_REPEAT_S = 0.2


def take_over(address: str, keys_folder: str) -> int:
    """Command the standby at `address` to lead, wait until it leads, and return its leader number.

    Raises:
        ConfigError: no scheduler responds, or it does not lead in time.
    """
    keys = load_keys(keys_folder, SCHEDULER)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = PeerLink(context, address, (lambda _socket: None) if keys is None else keys.protect_scheduler)
    end, has_replied = time.monotonic() + _TIMEOUT_S, False
    try:
        while (now := time.monotonic()) < end:
            if link.send(PeerMessage(take_over=TakeOver())):
                link.socket.poll(int(_REPEAT_S * 1000))
            else:
                time.sleep(_REPEAT_S / 4)
            while (message := link.receive(now)) is not None:
                has_replied = True
                if message.leads:
                    return message.leader_number
            link.renew(now)
            if has_replied:
                time.sleep(_REPEAT_S / 4)
    finally:
        link.close()
        context.term()
    found = (
        "it did not lead in time; see its log"
        if has_replied
        else f"no scheduler responded within {_TIMEOUT_S:g} s; use the --standby-address of a scheduler that was"
        " started with --standby-of, and the same --keys as the scheduler, if it has any"
    )
    raise ConfigError(f"take_over (--take-over): {address}: {found}")
