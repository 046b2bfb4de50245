"""Grammar checks: compiles each new grammar on trial before its request is queued.

Compilation runs in a separate process that can be killed (`trial_compiler`). The first trial has a small CPU time
limit, and a second trial has a limit five times as large. Results, including rejections, are cached, so that a schema
which is sent with every request is compiled once.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from services.access.principals import CURRENT
from services.access.shares import Share
from services.errors import RETRY_MS
from services.grammars.trial_compiler import Trial, TrialCompiler, TrialUnavailableError, start_trial_compiler
from services.grammars.trial_process import Verdict
from shared.errors import FieldViolation, InvalidRequestError, OverloadedError
from shared.grammars import MAX_GRAMMAR, MAX_STRINGS
from shared.logging import get_logger

TIMEOUT_S = 10.0
"""Timeout for a grammar's trial, in seconds."""
QUICK_CPU_S = 0.05
"""CPU time limit for the first trial, in seconds. A schema of 20 kB takes 0.015 s."""
LONG_CPU_S = 0.25
"""CPU time limit for the second trial, in seconds. It is the maximum cost of a grammar on a worker."""

_MAX_KNOWN_BYTES = 16 << 20
"""Maximum size of the cache, bytes."""
_KNOWN_OVERHEAD = 256
"""Approximate memory per cached grammar in addition to its text, bytes."""


@dataclass(slots=True)
class _Check:
    """A grammar on trial."""

    task: "asyncio.Task[bytes | str]"
    principal: str
    """Principal to whose share the trial is charged."""
    num_requests: int = 0
    """Number of requests that wait for it."""


class GrammarChecker:
    """Checks the grammars of one front-end process."""

    def __init__(self, tokenizer_file: Path, trials: Share, costly_trials: Share) -> None:
        """Create a checker.

        Args:
            tokenizer_file: tokenizer.json of the model.
            trials: limits the grammars on trial of each principal.
            costly_trials: limits the grammars that need a second trial, so that they do not block other grammars.
        """
        self._trials, self._costly_trials = trials, costly_trials
        self._file = tokenizer_file
        self._known: OrderedDict[bytes, bytes | str] = OrderedDict()
        """Cache by digest of model and grammar: the serialized grammar for workers, or the reason for rejection."""
        self._known_bytes = 0
        """Size of the cache, at most _MAX_KNOWN_BYTES."""
        self._checks: dict[bytes, _Check] = {}
        """Running trials, by the same digest."""
        self._starting: asyncio.Task[TrialCompiler] | None = None
        """Task that starts the trial compiler; it may be done already."""

    async def check(self, grammar: v1.Grammar, model: link_pb2.ServedModel, field: str = "") -> bytes:
        """Return the grammar in the form that workers accept, serialized.

        Args:
            grammar: the grammar.
            model: the served model.
            field: field name for errors; if empty, the grammar's field.

        Raises:
            InvalidRequestError: the grammar is not usable.
            OverloadedError: too many grammars are being checked.
        """
        serialized = grammar.SerializeToString(deterministic=True)
        key = sha256(model.fingerprint.encode() + serialized).digest()
        found = self._known.get(key)
        if found is None:
            found = await self._checked(key, serialized, model)
        else:
            self._known.move_to_end(key)
        if isinstance(found, str):
            raise InvalidRequestError(FieldViolation(field or f"grammar.{grammar.WhichOneof('kind')}", found))
        return found

    async def close(self) -> None:
        """Stop the trial compiler."""
        for check in self._checks.values():
            check.task.cancel()
        if self._starting is not None:
            await _end(self._starting)

    async def _checked(self, key: bytes, serialized: bytes, model: link_pb2.ServedModel) -> bytes | str:
        """Wait for the trial of a grammar, shared by all requests with the same grammar.

        If all waiting requests are cancelled before the trial has begun, the trial is cancelled too.
        """
        check = self._checks.get(key)
        if check is None:
            principal = CURRENT.get().name
            if not self._trials.take(principal):
                raise _overloaded()
            task = asyncio.create_task(self._try(key, serialized, model, principal))
            check = self._checks[key] = _Check(task, principal)
        check.num_requests += 1
        try:
            return await asyncio.shield(check.task)
        except (TimeoutError, TrialUnavailableError):
            raise _overloaded() from None
        finally:
            check.num_requests -= 1
            if not check.num_requests:
                check.task.cancel()
                self._trials.give_back(check.principal)
                if self._checks.get(key) is check:
                    del self._checks[key]

    async def _try(self, key: bytes, serialized: bytes, model: link_pb2.ServedModel, principal: str) -> bytes | str:
        compiler = await self._compiler(model)
        async with asyncio.timeout(TIMEOUT_S):
            trial = await compiler.quick.run(serialized, QUICK_CPU_S, principal)
            is_costly = trial.verdict is Verdict.EXCEEDED
            if is_costly:
                with self._costly_trials.holding(principal):
                    trial = await compiler.long.run(serialized, LONG_CPU_S, principal)
        found = _outcome(trial, is_costly=is_costly)
        self._remember(key, found)
        return found

    def _remember(self, key: bytes, found: bytes | str) -> None:
        self._known[key] = found
        self._known_bytes += len(found) + _KNOWN_OVERHEAD
        while self._known_bytes > _MAX_KNOWN_BYTES:
            self._known_bytes -= len(self._known.popitem(last=False)[1]) + _KNOWN_OVERHEAD

    async def _compiler(self, model: link_pb2.ServedModel) -> TrialCompiler:
        """Return a model's trial compiler; start it if it is not running."""
        while True:
            starting = self._starting
            if starting is None or (starting.done() and not _serves(starting, model)):
                self._starting = starting = asyncio.create_task(self._start(starting, model))
            compiler = await asyncio.shield(starting)
            if compiler.fingerprint == model.fingerprint:
                return compiler

    async def _start(
        self, previous: "asyncio.Task[TrialCompiler] | None", model: link_pb2.ServedModel
    ) -> TrialCompiler:
        if previous is not None:
            get_logger().warning("restarting the trial compiler of grammars")
            await _end(previous)
        return await start_trial_compiler(self._file, model)


def _serves(starting: "asyncio.Task[TrialCompiler]", model: link_pb2.ServedModel) -> bool:
    """Return whether a finished start produced a running compiler with the model's tokenizer."""
    if starting.cancelled() or starting.exception() is not None:
        return False
    compiler = starting.result()
    return compiler.is_running and compiler.fingerprint == model.fingerprint


async def _end(starting: "asyncio.Task[TrialCompiler]") -> None:
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().close()


def _outcome(trial: Trial, *, is_costly: bool) -> bytes | str:
    """Return the grammar in the form that workers accept, or the reason for rejection."""
    match trial.verdict:
        case Verdict.USABLE:
            grammar = plan_pb2.Grammar.FromString(trial.said)
            grammar.costly = is_costly
            return grammar.SerializeToString(deterministic=True)
        case Verdict.REFUSED:
            return trial.said.decode()
        case Verdict.EXCEEDED:
            return f"takes more than {LONG_CPU_S:g} s to compile; simplify it"
        case Verdict.CRASHED:
            return "needs too much memory or is nested too deeply; simplify it"


def _overloaded() -> OverloadedError:
    return OverloadedError("grammar: too many grammars are being checked; try again soon", retry_ms=RETRY_MS)


def check_grammar(request: v1.GenerateRequest) -> Iterator[FieldViolation]:
    """Yield the violations of a request's grammar that are visible without compiling it."""
    if not request.HasField("grammar"):
        return
    grammar = request.grammar
    kind = grammar.WhichOneof("kind")
    if kind is None:
        yield FieldViolation("grammar", "missing; add one of `json_schema`, `regex`, `ebnf`, `choice`, `json_object`")
        return
    if grammar.whitespace and kind not in ("json_schema", "json_object"):
        yield FieldViolation("grammar.whitespace", "only JSON has whitespace to allow; leave it unset")
    if kind == "choice":
        choices = list(grammar.choice.choices)
        if not 0 < len(choices) <= MAX_STRINGS or not all(choices):
            yield FieldViolation("grammar.choice.choices", f"must be 1 to {MAX_STRINGS} strings, none of them empty")
    elif kind == "json_object" and not grammar.json_object:
        yield FieldViolation("grammar.json_object", "must be true; leave `grammar` unset for no constraint")
    elif kind != "json_object" and not getattr(grammar, kind):
        yield FieldViolation(f"grammar.{kind}", "must not be empty")
    if grammar.ByteSize() > MAX_GRAMMAR:
        yield FieldViolation(f"grammar.{kind}", f"too long; use at most {MAX_GRAMMAR} bytes")
    if request.stop.min_tokens:
        yield FieldViolation("stop.min_tokens", "cannot be combined with `grammar`, which decides when the output ends")
