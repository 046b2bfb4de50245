"""Process that compiles grammars on trial, so that no grammar can block or crash the front end.

The process reads the tokenizer, which takes about 7 µs per token, and then forks one child per lane. A child runs its
lane's trials one after the other. A grammar that exceeds its CPU time, overflows the stack or exhausts memory kills the
child. The parent then sends the result instead and forks another child. All processes exit when the front end closes
the lanes' sockets, or dies.

Frame format on a lane, little-endian. Trial: CPU time in seconds (f32), length (u32), and a serialized quire.v1.Grammar
of this length. Result: verdict (u8), length (u32), and as many bytes with either the serialized quire.plan.v1.Grammar
or the reason for the rejection.
"""

import enum
import mmap
import os
import random
import resource
import signal
import socket
import struct
import sys
from pathlib import Path

import numpy as np
from llguidance import LLMatcher

from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from shared.grammars import (
    GrammarError,
    GrammarTokenizer,
    check_matcher,
    check_text,
    compile_grammar,
    lark_of_choices,
    lark_of_ebnf,
    with_whitespace,
)

TRIAL = struct.Struct("<fI")
ANSWER = struct.Struct("<BI")
READY = b"\n"
"""Sent on the first lane once the tokenizer has been read."""

_NICENESS = 5
"""Niceness of the process, below the front end's priority."""
_STACK_BYTES = 4 << 20
"""Stack limit: half of a worker thread's limit."""
_MEMORY_BYTES = 1 << 30
"""Memory that a child may allocate beyond its initial size."""
_NUM_WALKS, _WALK_TOKENS = 2, 12


class Verdict(enum.IntEnum):
    """Result of a trial."""

    USABLE = 0
    REFUSED = 1
    EXCEEDED = 2
    """It exceeded its CPU time."""
    CRASHED = 3
    """It killed the process: stack overflow or out of memory."""


def main() -> None:
    path, vocab_size, eos_token_ids, *descriptors = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer: GrammarTokenizer | GrammarError
    try:
        tokenizer = GrammarTokenizer(
            Path(path), int(vocab_size), [int(token) for token in eos_token_ids.split(",") if token]
        )
    except GrammarError as error:
        tokenizer = error
    lanes = [socket.socket(fileno=int(descriptor)) for descriptor in descriptors]
    try:
        lanes[0].sendall(READY)
        _supervise(lanes, tokenizer)
    except ConnectionError:
        return  # The front end has closed the sockets.


def _supervise(lanes: list[socket.socket], tokenizer: GrammarTokenizer | GrammarError) -> None:
    """Keep one child per lane alive until all children have exited normally."""
    busy = mmap.mmap(-1, len(lanes))
    """By lane: 1 while its child has a trial."""
    children = {_fork(lanes, number, busy, tokenizer): number for number in range(len(lanes))}
    while children:
        pid, status = os.wait()
        number = children.pop(pid)
        if status == 0:
            continue
        if busy[number]:
            is_overtime = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            verdict = Verdict.EXCEEDED if is_overtime else Verdict.CRASHED
            busy[number] = 0
            lanes[number].sendall(ANSWER.pack(verdict, 0))
        children[_fork(lanes, number, busy, tokenizer)] = number


def _fork(lanes: list[socket.socket], number: int, busy: mmap.mmap, tokenizer: GrammarTokenizer | GrammarError) -> int:
    """Start the child process for a lane; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for other in lanes:
            if other is not lanes[number]:
                other.close()
        # Discard stderr, because the library reports its own crashes there.
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)
        memory = (
            int(Path("/proc/self/statm").read_text("utf-8").split()[0]) * os.sysconf("SC_PAGE_SIZE") + _MEMORY_BYTES
        )
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        _serve(lanes[number], number, busy, tokenizer)
    except ConnectionError:
        pass
    except BaseException:
        os._exit(1)
    os._exit(0)


def _serve(lane: socket.socket, number: int, busy: mmap.mmap, tokenizer: GrammarTokenizer | GrammarError) -> None:
    while header := _receive(lane, TRIAL.size):
        cpu_s, length = TRIAL.unpack(header)
        grammar = v1.Grammar.FromString(_receive(lane, length))
        busy[number] = 1
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        verdict, said = _try(grammar, tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        busy[number] = 0
        lane.sendall(ANSWER.pack(verdict, len(said)) + said)


def _try(grammar: v1.Grammar, tokenizer: GrammarTokenizer | GrammarError) -> tuple[Verdict, bytes]:
    try:
        if isinstance(tokenizer, GrammarError):
            raise tokenizer
        wanted = to_plan(grammar)
        kind = wanted.WhichOneof("kind") or ""
        matcher = compile_grammar(kind, str(getattr(wanted, kind, "")), tokenizer)
        for seed in range(_NUM_WALKS):
            _consume_random_tokens(matcher.deep_copy(), random.Random(seed))
    except GrammarError as error:
        return Verdict.REFUSED, str(error).encode()
    except MemoryError:
        return Verdict.CRASHED, b""
    return Verdict.USABLE, wanted.SerializeToString(deterministic=True)


def _consume_random_tokens(matcher: LLMatcher, rng: random.Random) -> None:
    """Consume some allowed tokens, to reject grammars that exceed a limit in their first steps.

    Raises:
        GrammarError: see the class.
    """
    for _ in range(_WALK_TOKENS):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        check_matcher(matcher)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        matcher.consume_token(int(allowed[rng.randrange(len(allowed))]))
        if matcher.is_stopped() and not matcher.is_error():
            return
        check_matcher(matcher)


def to_plan(grammar: v1.Grammar) -> plan_pb2.Grammar:
    """Return the grammar in the form that workers accept.

    Raises:
        GrammarError: it has no such form.
    """
    match grammar.WhichOneof("kind"):
        case "json_schema":
            check_text(grammar.json_schema)
            schema = grammar.json_schema
        case "regex":
            return plan_pb2.Grammar(regex=grammar.regex)
        case "ebnf":
            return plan_pb2.Grammar(lark=lark_of_ebnf(grammar.ebnf))
        case "choice":
            return plan_pb2.Grammar(lark=lark_of_choices(grammar.choice.choices))
        case _:
            schema = '{"type": "object"}'
    return plan_pb2.Grammar(json_schema=with_whitespace(schema) if grammar.whitespace else schema)


def _receive(lane: socket.socket, length: int) -> bytes:
    """Return `length` bytes, or none after the front end has closed the lane."""
    parts = []
    while length and (part := lane.recv(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts) if not length else b""


if __name__ == "__main__":
    main()
