"""Grammars: compiled in threads, with one matcher per row that gives a token mask per step.

A grammar is compiled once (`GrammarStore`), outside of the steps. Each row with the grammar gets a copy of the compiled
matcher, which replays the existing output. A request that was preempted, or moved here from another worker, thus
continues where it stopped. A matcher reads each sampled token before it computes the next mask (`HostTokens`). It reads
no token after the row's last one.
"""

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLMatcher

from kernels.token_masks import mask_tokens
from shared.frames import MAX_GRAMMARS
from shared.grammars import GrammarError, GrammarTokenizer, compile_grammar
from shared.logging import get_logger
from worker_svc.device.upload import upload
from worker_svc.interface.arrays import Int32Array
from worker_svc.interface.grammar import Grammar, GrammarFailureCause, GrammarReport, GrammarRequest
from worker_svc.interface.result import FailureKind, RowFailure

_STACK_BYTES = 16 << 20
"""Stack size of a compiling thread. The front end tests each grammar with a smaller stack, so this is sufficient."""


class GrammarStore:
    """Compiled grammars of one worker.

    Two threads compile grammars: one those that the front end marked as costly, the other all others, which therefore
    never wait for a costly one. The library releases the GIL while it compiles.

    The scheduler decides which grammars to retain, and names the ones to drop. The store also retains grammars from
    earlier epochs while it has room, and evicts the least recently used ones.
    """

    def __init__(self, tokenizer: GrammarTokenizer, eos_token_ids: tuple[int, ...], max_rows: int) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._max_kept = MAX_GRAMMARS + max_rows
        """Upper bound for what a scheduler expects: MAX_GRAMMARS unused grammars, and one per row."""
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        """Protects data shared by the threads and the loop; not held during compilation."""
        self._cheap, self._costly = _compiling_thread("grammar"), _compiling_thread("costly-grammar")
        self._reports: list[GrammarReport] = []
        self._pending = 0

    def __contains__(self, key: bytes) -> bool:
        """Return whether the grammar is compiled."""
        with self._lock:
            return key in self._compiled

    @property
    def pending(self) -> bool:
        """Whether a report is outstanding."""
        return self._pending > 0

    def prepare(self, request: GrammarRequest) -> None:
        """Drop the grammars that the scheduler names, and compile the requested one in a thread.

        `take_reports` returns the outcome.
        """
        with self._lock:
            for key in request.drop:
                self._compiled.pop(key, None)
        self._pending += 1
        grammar = request.grammar
        (self._costly if grammar.costly else self._cheap).submit(self._prepare, grammar)

    def take_reports(self) -> list[GrammarReport]:
        """Return the reports of grammars since the last call."""
        if not self._pending:
            return []
        with self._lock:
            reports, self._reports = self._reports, []
        self._pending -= len(reports)
        return reports

    def forget_reports(self) -> None:
        """Drop the reports that have arrived, because the epoch is over."""
        self.take_reports()

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Return a new matcher for the start of an output; compile the grammar if necessary.

        Raises:
            GrammarError: the grammar is invalid.
        """
        compiled = self._find(grammar.key)
        if compiled is None:
            compiled = self._compile(grammar)
        return compiled.deep_copy()

    def close(self) -> None:
        """Shut down the threads."""
        for thread in (self._cheap, self._costly):
            thread.shutdown(wait=False, cancel_futures=True)

    def _find(self, key: bytes) -> LLMatcher | None:
        """Return a compiled grammar and mark it as recently used; None if it is not in the store."""
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._compiled.move_to_end(key)
            return compiled

    def _prepare(self, grammar: Grammar) -> None:
        try:
            if self._find(grammar.key) is None:
                self._compile(grammar)
        except GrammarError as error:
            self._report(GrammarReport(grammar.key, str(error), GrammarFailureCause.GRAMMAR))
        except Exception as error:
            failure = f"compilation failed on this worker: {str(error) or type(error).__name__}"
            self._report(GrammarReport(grammar.key, failure, GrammarFailureCause.WORKER))
        else:
            self._report(GrammarReport(grammar.key))

    def _report(self, report: GrammarReport) -> None:
        with self._lock:
            self._reports.append(report)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = compile_grammar(grammar.kind, grammar.text, self._tokenizer)
        with self._lock:
            self._compiled[grammar.key] = matcher
            self._compiled.move_to_end(grammar.key)
            while len(self._compiled) > self._max_kept:
                self._compiled.popitem(last=False)
        return matcher


def _compiling_thread(name: str) -> ThreadPoolExecutor:
    """Start a thread with a large stack.

    The thread has normal priority. It holds the GIL for short moments only, and with a lower priority the steps would
    wait longer for the GIL.
    """
    usual = threading.stack_size(_STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        pool.submit(int).result()  # The stack size is fixed when the thread starts.
        return pool
    finally:
        threading.stack_size(usual)


@dataclass(slots=True)
class _RowGrammar:
    matcher: LLMatcher | None
    """None: the grammar is not usable."""
    failure: str
    """Why the grammar is not usable; empty if it is."""
    ends: frozenset[int]
    """Tokens that end the row."""
    over: bool = False
    """Whether the row has sampled an end token; later tokens are discarded."""
    is_invalid: bool = False
    """Whether the request is at fault: its sampling parameters are invalid."""


class GrammarRows:
    """Grammars of all rows of one worker."""

    def __init__(self, store: GrammarStore | None, vocab_size: int, max_rows: int, device: torch.device) -> None:
        """Create a table without rows; `store` is None if the model has no tokenizer that supports grammars."""
        self._store = store
        self._rows: dict[int, _RowGrammar] = {}
        # Each row's mask, with one bit per token, and its copy on the device.
        self._sent = np.zeros((max_rows, -(-vocab_size // 32)), np.int32)
        self._masks = torch.zeros(self._sent.shape, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def admit(self, row: int, grammar: Grammar | None, stops: Int32Array, output: Int32Array) -> None:
        """Admit a row whose output so far is `output`.

        If the grammar is not usable, or the output does not match it, the row can sample no token. Other rows are not
        affected.
        """
        self._rows.pop(row, None)
        if grammar is None:
            return
        matcher, failure = None, "this worker's model has no tokenizer that supports grammars"
        if self._store is not None:
            try:
                matcher, failure = self._store.matcher(grammar), ""
            except GrammarError as error:
                failure = f"the grammar compiled earlier but fails now: {error}"
        if matcher is not None and len(output):
            matcher.consume_tokens(output.tolist())  # After a failure, is_error() stays true.
            failure = "the output so far does not match the grammar" if matcher.is_error() else ""
        if failure:
            get_logger().error("grammar of a row cannot be used", row=row, reason=failure)
        eos = self._store.eos_token_ids if self._store is not None else frozenset()
        self._rows[row] = _RowGrammar(matcher, failure, eos | set(stops.tolist()))

    def refuse(self, row: int, reason: str) -> None:
        """Admit a row that can sample no token, because its sampling parameters are invalid."""
        get_logger().error("sampling parameters of a row cannot be used", row=row, reason=reason)
        self._rows[row] = _RowGrammar(None, reason, frozenset(), is_invalid=True)

    def explain(self, row: int, generation: int) -> RowFailure | None:
        """Return why the row's grammar failed; None if it did not fail or the row has none."""
        grammar = self._rows.get(row)
        if grammar is None:
            return None
        if grammar.failure:
            kind, field = (
                (FailureKind.NO_TOKEN_ALLOWED, "sampling") if grammar.is_invalid else (FailureKind.INTERNAL, "")
            )
            return RowFailure(row=row, generation=generation, kind=kind, reason=grammar.failure, field=field)
        if grammar.matcher is not None and grammar.matcher.is_error():
            return RowFailure(
                row=row,
                generation=generation,
                kind=FailureKind.GRAMMAR_TOO_COSTLY,
                reason="exceeds the limit of work per token at this point of the output;"
                " simplify it: use fewer alternatives and repetitions, or longer fixed texts",
                field="grammar",
            )
        return None

    def leave(self, row: int) -> None:
        """Forget a row that leaves."""
        self._rows.pop(row, None)

    def note_token(self, row: int, token: int) -> None:
        """Pass a sampled token to the row's matcher."""
        grammar = self._rows.get(row)
        if grammar is None or grammar.over or grammar.matcher is None:
            return
        if token in grammar.ends:
            grammar.over = True
        else:
            grammar.matcher.consume_token(token)

    def mask(self, logits: torch.Tensor, rows: tuple[int, ...], lines: torch.Tensor, places: torch.Tensor) -> None:
        """Set the logits of tokens that the grammars forbid to -inf, in place.

        Only masks that changed since the row's last step are sent to the device.

        Args:
            logits: `[S, vocab_size]`.
            rows: the rows with a grammar.
            lines: `[R] int64`: `rows` on the device.
            places: `[R] int64`: their places in `logits`, on the device.
        """
        changed = []
        for row in rows:
            allowed = self.allowed(row)
            if not np.array_equal(allowed, self._sent[row]):
                self._sent[row] = allowed
                changed.append(row)
        if changed:
            device = self._masks.device
            self._masks.index_copy_(0, upload(np.array(changed), device), upload(self._sent[changed], device))
        mask_tokens(logits, places, self._masks, lines)

    def allowed(self, row: int) -> Int32Array:
        """Return the mask of permitted tokens, one bit per token from the lowest on; 0 if the row's grammar failed."""
        grammar, store = self._rows[row], self._store
        mask = np.zeros(self._sent.shape[1], np.int32)
        if grammar.matcher is None or store is None:
            return mask
        octets = mask.view(np.uint8)
        if grammar.over or (grammar.matcher.is_stopped() and not grammar.matcher.is_error()):
            for token in store.eos_token_ids:
                octets[token // 8] |= 1 << token % 8
            return mask
        bits = np.frombuffer(grammar.matcher.compute_bitmask(), np.uint8)[: octets.size]
        if not grammar.matcher.is_error():
            octets[: bits.size] = bits
        return mask
