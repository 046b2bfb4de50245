"""Peers with valid keys that send malformed messages, one for each socket of `tests.chaos.frames`.

Each starts the process that it attacks, sends batches of frames (`batch`), and between them asks whether that process
still does its work (`check`).
"""

from tests.chaos.adversaries.base import Adversary
from tests.chaos.adversaries.on_frontend import FalseCore
from tests.chaos.adversaries.on_scheduler import FalseFrontend, FalseWorker
from tests.chaos.adversaries.on_worker import FalseScheduler

__all__ = ["Adversary", "FalseCore", "FalseFrontend", "FalseScheduler", "FalseWorker"]
