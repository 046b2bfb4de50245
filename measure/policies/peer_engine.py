"""A peer's scheduler as an engine: a process with its own environment and one scheduler per worker.

A router in front of the schedulers chooses a worker for each job when it is sent, as a load balancer does.
"""

import atexit
import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from measure.policies.costs import Costs, Work
from measure.policies.engine import Ended, Engine, News, Step
from measure.policies.jobs import Job
from measure.policies.routers import Router
from shared.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
_MILLISECONDS = 1000
_Process = tuple["subprocess.Popen[str]", TextIO]
"""A process and its standard error."""
_idle: dict[Path, _Process] = {}
"""By interpreter, a process that no engine uses."""


@atexit.register
def _end_idle() -> None:
    while _idle:
        _end(*_idle.popitem()[1])


def _start(python: Path) -> _Process:
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `_end` closes it
    try:
        process = subprocess.Popen(
            [str(python), "-m", "measure.policies.peer.vllm"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    except OSError as error:
        raise ConfigError(f"--vllm-python: {python}: cannot be run ({error.strerror}); run make arena-vllm") from None
    return process, errors


def _end(process: "subprocess.Popen[str]", errors: TextIO) -> None:
    process.kill()
    process.communicate()
    errors.close()


class PeerEngine(Engine):
    """vLLM's schedulers behind a router.

    Args:
        python: the interpreter of the environment with vLLM.
        policy: vLLM's `--scheduling-policy`.
        settings: fields of vLLM's SchedulerConfig.
        costs: cost model of the devices.
        num_workers: number of workers.
        in_flight: maximum steps in flight per worker.
        router: chooses the worker of each job.

    Raises:
        ConfigError: the process does not start, or a setting is not one of vLLM's.
    """

    def __init__(
        self,
        python: Path,
        policy: str,
        settings: Mapping[str, Any],
        costs: Costs,
        *,
        num_workers: int,
        in_flight: int,
        router: Router,
    ) -> None:
        self._in_flight_limit, self._router = in_flight, router
        self._python = python
        self._process, self._errors = _idle.pop(python) if python in _idle else _start(python)
        facts = dataclasses.asdict(costs) | {"num_blocks": costs.num_blocks}
        started = self._ask(
            op="start", costs=facts, policy=policy, settings=dict(settings), workers=num_workers, in_flight=in_flight
        )
        self.version = started["version"]
        self.settings: dict[str, Any] = started["settings"]
        self._arrived: list[list[Any]] = [[] for _ in range(num_workers)]
        """By worker: jobs that its scheduler does not know yet."""
        self._worker_of: dict[int, int] = {}
        self._num_in_flight = [0] * num_workers
        self._may_plan: dict[int, None] = {}
        """Workers whose scheduler may have work, in the order in which they began to wait."""
        self._due_at: dict[int, float] = {}
        """Times from which other workers may have work, because a copy ends."""
        self._num_steps = 0
        self._news = News()

    def submit(self, number: int, job: Job, now: float) -> None:
        worker = self._router.choose(job)
        self._worker_of[number] = worker
        self._arrived[worker].append([number, job.prompt, job.outputs, self._priority(job)])
        self._may_plan[worker] = None

    def due(self, now: float) -> Sequence[int]:
        self._may_plan |= dict.fromkeys(worker for worker, at in self._due_at.items() if at <= now)
        return [worker for worker in self._may_plan if self._num_in_flight[worker] < self._in_flight_limit]

    def next_due(self, now: float) -> float | None:
        return min(self._due_at.values(), default=None)

    def next_step(self, worker: int, now: float) -> Step | None:
        if self._num_in_flight[worker] >= self._in_flight_limit:
            return None
        self._due_at.pop(worker, None)
        jobs, self._arrived[worker] = self._arrived[worker], []
        answer = self._ask(op="next", worker=worker, now=now, jobs=jobs)
        self.cpu_s = answer["cpu_s"]
        if answer["work"] is None:
            del self._may_plan[worker]
            if answer["due"] is not None and not self._num_in_flight[worker]:
                self._due_at[worker] = answer["due"]
            return None
        self._num_in_flight[worker] += 1
        self._num_steps += 1
        return Step(worker=worker, number=self._num_steps, work=Work(*answer["work"]))

    def complete(self, step: Step, now: float, idle_s: float) -> None:
        answer = self._ask(op="done", worker=step.worker, now=now)
        self.cpu_s = answer["cpu_s"]
        self._num_in_flight[step.worker] -= 1
        self._may_plan[step.worker] = None
        self._news.tokens += answer["tokens"]
        for number, num_outputs, cached, preemptions in answer["ended"]:
            self._router.ended(self._worker_of.pop(number))
            self._news.ended.append(
                Ended(number=number, num_outputs=num_outputs, cached=cached, preemptions=preemptions)
            )

    def take_news(self) -> News:
        news, self._news = self._news, News()
        return news

    def close(self) -> None:
        """Keep the process for the next engine, because importing vLLM takes seconds.

        End the process if another one is already idle.
        """
        if self._process.poll() is None and self._python not in _idle:
            _idle[self._python] = self._process, self._errors
        else:
            _end(self._process, self._errors)

    def _priority(self, job: Job) -> int:
        """Return vLLM's priority, where lower is more urgent. A job with a target gets its deadline in ms."""
        if job.tells_targets and job.ttft_target_s is not None:
            return round((job.at + job.ttft_target_s) * _MILLISECONDS)
        return -job.priority

    def _ask(self, **message: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._errors.seek(0)
            errors = self._errors.read()
            raise ConfigError(f"--vllm-python: the process with vLLM has ended: {_cause(errors)}; see docs/arena.md")
        return json.loads(line)


def _cause(errors: str) -> str:
    """Return the end of a traceback as one line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip() and "further information" not in line]
    return " ".join(lines[-3:]) or "no message"
