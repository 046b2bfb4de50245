"""A process that records until it is killed, for at most a minute; prints every completed call."""

import sys
import time
from pathlib import Path

from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.recorder.recorder import Recorder
from scheduler_svc.recorder.tape import RecordedScheduler

recorder = Recorder(Path(sys.argv[1]), max_bytes=8 << 20, config=CoreConfig(), incarnation=1, release="test")
core = RecordedScheduler(CoreConfig(), 1, recorder.tape)
for _ in range(30_000):
    now = time.monotonic()
    recorder.turn(core, now)
    core.handle(ev.TimePassed(), now)
    print(now, flush=True)
    time.sleep(0.002)
