"""Follower loop: applies the commands of rank 0 to this rank's engine, until rank 0 sends a stop.

A follower has no link, sends no results and needs no tokenizer. Its row table equals that of rank 0, because both apply
the same plans and get the same tokens.
"""

import time

from shared.logging import get_logger
from worker_svc.execution.engine import Engine
from worker_svc.interface.errors import PlanError
from worker_svc.link.decoding import decode_frame
from worker_svc.ranks.commands import Command, Kind, receive
from worker_svc.ranks.group import Group, RankLostError


def follow(group: Group, engine: Engine) -> None:
    """Follow rank 0 until it stops.

    Raises:
        RankLostError: another rank was lost, or a step failed on this one.
    """
    while True:
        command = receive(group)
        match command.kind:
            case Kind.PLAN:
                _launch(command, engine, group)
            case Kind.RESET:
                engine.reset()
            case Kind.STOP:
                return


def _launch(command: Command, engine: Engine, group: Group) -> None:
    try:
        for _ in range(command.num_collected):
            engine.collect()
        engine.launch(decode_frame(command.frame, engine.limits), time.time_ns())
    except PlanError as error:
        # Rank 0 detects the same error and resets.
        get_logger().info("invalid plan", reason=str(error))
    except Exception as error:
        raise RankLostError(f"a step failed on rank {group.rank}: {type(error).__name__}: {error}") from error
