"""Peers with valid keys that send malformed messages, one for each socket of `checks.chaos.frames`.

Each adversary starts its target process and sends batches of frames (`batch`). Between batches it checks that the
target still works correctly (`check`).
"""

from checks.chaos.adversaries.base import Adversary
from checks.chaos.adversaries.on_frontend import FalseCore
from checks.chaos.adversaries.on_scheduler import FalseFrontend, FalseWorker
from checks.chaos.adversaries.on_worker import FalseScheduler

__all__ = ["Adversary", "FalseCore", "FalseFrontend", "FalseScheduler", "FalseWorker"]
