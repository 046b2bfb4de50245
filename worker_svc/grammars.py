"""Grammars beside the sampler: compiled in a thread, one matcher per row, a mask per step.

A grammar is compiled once (`GrammarStore`), off the way of steps; every row with it gets a copy of the compiled
matcher, brought to where the row is by replaying its output. So a request that was paused, or moved here from a worker
that died, goes on as it was. A matcher sees each sampled token before the next one is masked (`HostTokens`), and none
after the one that ended the row.
"""

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from llguidance import LLMatcher

from protos.quire.plan.v1 import plan_pb2
from shared.columns import Int32Array
from shared.grammars import GrammarError, GrammarTokenizer, compile_grammar
from shared.logging import get_logger

MAX_COMPILED = 256
"""Compiled grammars that are kept."""


class GrammarStore:
    """The compiled grammars of one worker."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._make_tokenizer = partial(GrammarTokenizer, tokenizer_file, vocab_size, eos_token_ids)
        self.eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer: GrammarTokenizer | None = None
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        """Held for whatever the thread and the loop share; never while compiling."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._reports: list[plan_pb2.GrammarReport] = []
        self._pending = 0

    @property
    def pending(self) -> bool:
        """Whether reports are on their way."""
        return self._pending > 0

    def prepare(self, request: plan_pb2.PrepareGrammar) -> None:
        """Compiles a grammar in the thread; `take_reports` tells when."""
        self._pending += 1
        self._pool.submit(self._prepare, request)

    def take_reports(self) -> list[plan_pb2.GrammarReport]:
        """What has become of grammars since the last call."""
        if not self._pending:
            return []
        with self._lock:
            reports, self._reports = self._reports, []
        self._pending -= len(reports)
        return reports

    def forget_reports(self) -> None:
        """Nobody waits for reports any more: the epoch is over."""
        self.take_reports()

    def matcher(self, serialized: bytes) -> LLMatcher:
        """A matcher of one's own, at the beginning of the output; compiles what is not there.

        Raises:
            GrammarError: the grammar cannot be used.
        """
        key = sha256(serialized).digest()
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._compiled.move_to_end(key)
        if compiled is None:
            compiled = self._compile(key, serialized)
        return compiled.deep_copy()

    def close(self) -> None:
        """Lets the thread go."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, request: plan_pb2.PrepareGrammar) -> None:
        report = plan_pb2.GrammarReport(key=request.key)
        try:
            self._compile(request.key, request.grammar)
        except Exception as error:
            report.failure = str(error) or type(error).__name__
        with self._lock:
            self._reports.append(report)

    def _compile(self, key: bytes, serialized: bytes) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        try:
            grammar = plan_pb2.Grammar.FromString(serialized)
        except DecodeError:
            raise GrammarError("a grammar that does not parse") from None
        matcher = compile_grammar(grammar, self._tokenizer)
        with self._lock:
            self._compiled[key] = matcher
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher


@dataclass(slots=True)
class _RowGrammar:
    matcher: LLMatcher | None
    """None: the grammar cannot be used."""
    ends: frozenset[int]
    """Tokens that end the row."""
    over: bool = False
    """The row has sampled one of them; whatever it samples until it leaves is discarded."""


class GrammarRows:
    """The grammars of all rows of one worker."""

    def __init__(self, store: GrammarStore | None, vocab_size: int) -> None:
        """`store` is None where no grammar can be used, as in a model without a tokenizer."""
        self._store = store
        self._vocab_size = vocab_size
        self._rows: dict[int, _RowGrammar] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def admit(self, row: int, serialized: bytes, stops: Int32Array, output: Int32Array) -> None:
        """A row arrives, having generated `output` before.

        A grammar that cannot be used, or an output that does not conform to it, allows the row no token; it harms no
        other row.
        """
        self._rows.pop(row, None)
        if not serialized:
            return
        matcher = None
        try:
            matcher = self._store.matcher(serialized) if self._store is not None else None
        except GrammarError as error:
            get_logger().error("a grammar that was ready cannot be used", row=row, reason=str(error))
        if matcher is not None and len(output):
            matcher.consume_tokens(output.tolist())  # on failure it says so for ever after
        eos = self._store.eos_token_ids if self._store is not None else frozenset()
        self._rows[row] = _RowGrammar(matcher, eos | set(stops.tolist()))

    def leave(self, row: int) -> None:
        """The row is over."""
        self._rows.pop(row, None)

    def note_token(self, row: int, token: int) -> None:
        """A row has sampled a token."""
        grammar = self._rows.get(row)
        if grammar is None or grammar.over or grammar.matcher is None:
            return
        if token in grammar.ends:
            grammar.over = True
        else:
            grammar.matcher.consume_token(token)

    def allowed(self, rows: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """`[R, vocab_size]`: which tokens each of these rows may sample now; none where its grammar has failed."""
        masks = np.zeros((len(rows), self._vocab_size), np.bool_)
        for line, row in enumerate(rows):
            grammar = self._rows[row]
            matcher = grammar.matcher
            if matcher is None or self._store is None:
                continue
            if grammar.over or (matcher.is_stopped() and not matcher.is_error()):
                masks[line, list(self._store.eos_token_ids)] = True
                continue
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            if not matcher.is_error():
                masks[line] = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return masks
