"""The state of one client's stream, without I/O: tokens of the core go in, batches for the reader come out.

Rules:
  * The core alone finishes a stream; `end` is called once, later calls are ignored.
  * Every token has an index. Tokens the stream already has are ignored, a gap is reported to the caller.
  * Without stop strings, text is made only when the reader takes it, so a lagging reader costs next to nothing. With
    stop strings, every token is looked at when it arrives, because a match ends the work of the core.
  * A token whose text may still be cut off by a stop string is held back with its text. Hence the tokens that were
    sent are exactly those that count.
  * Credit flows back once the reader has taken a token (or the stream swallowed it), in portions of a quarter.
"""

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from protos.quire.link.v1 import link_pb2
from services.detokenizer import Detokenizer
from services.logprobs import Scored
from services.outbox import Batch, Outbox
from services.scheduling import SchedulingWishes, left_ns
from services.stop_strings import StopFinder
from shared.columns import to_column
from shared.errors import QuireError
from shared.frames import TOKEN_BYTES

_PORTIONS = 4
"""Credit goes back in so many portions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """Everything about a request that the core is told, fixed before it is submitted."""

    request_id: str
    prompt: bytes = field(repr=False)
    """Column of the prompt's tokens."""
    max_tokens: int
    stop_token_ids: bytes = b""
    """Column."""
    identity: bytes = b""
    """Which request this is, whichever front end has it; empty: it cannot be resumed."""
    resume_info: bytes = b""
    """A serialized GenerateRequest with what another front end needs to go on with it."""
    grammar: bytes = b""
    """A serialized quire.plan.v1.Grammar; empty: none."""
    sampling: bytes = b""
    """A serialized quire.plan.v1.SamplingParams."""
    wants_scores: bool = False
    """Log-probabilities of its tokens are wanted."""
    wants_prompt_scores: bool = False
    """The same of the prompt's."""
    choice: int = 0
    """Which of the request's continuations this is."""
    stop_strings: tuple[str, ...] = field(default=(), repr=False)
    include_stop_string: bool = False
    """A stop string that was found stays in the text."""
    min_tokens: int = 0
    """Stop strings that end within so many tokens are none."""
    credit: int
    """Bytes of output the stream may be ahead of its reader."""
    arrival: float
    """Monotonic time at which the RPC arrived, seconds."""
    deadline: float | None = None
    """Monotonic time, seconds."""
    traceparent: str = ""
    scheduling: SchedulingWishes = field(default_factory=SchedulingWishes)
    block_keys: bytes = field(default=b"", repr=False)
    """Keys of the prompt's full blocks of `block_size` tokens, joined; may be empty."""
    block_size: int = 0
    pooling: int = 0
    """A quire.plan.v1.Pooling: what its prompt is computed for, if nothing is generated."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt) // TOKEN_BYTES

    def for_choice(self, choice: int, sampling: bytes, identity: bytes) -> "StreamRequest":
        """The same request for a further one of its continuations."""
        return replace(self, choice=choice, sampling=sampling, identity=identity, wants_prompt_scores=False)


class Received(enum.Enum):
    """What tokens from the core meant for a stream."""

    TAKEN = "taken"
    MATCHED = "matched"
    """A stop string was found: the core is to be told."""
    GAP = "gap"
    """Tokens are missing: the stream must be submitted again."""


class Stream:
    """One live request."""

    __slots__ = (
        "_credit_portion", "_credit_returned", "_detokenizer", "_finder", "_flushed", "_held", "_outbox", "_skip_text",
        "_skip_tokens", "_text_length", "_wake", "_writing", "end", "error", "first_token_at", "number", "on_end",
        "over", "prompt_scores", "request", "scores",
    )  # fmt: skip

    def __init__(self, request: StreamRequest, detokenizer: Detokenizer, wake: Callable[[], None]) -> None:
        self.request = request
        self.number = 0
        """Given by the link at each submission."""
        self.first_token_at: float | None = None
        self.end: link_pb2.StreamEnd | None = None
        """How the core ended the stream."""
        self.error: QuireError | None = None
        """Why the stream ended without the core."""
        self.over = False
        """Nothing more will come; `take` may still have something."""
        self.scores: dict[int, Scored] = {}
        """By index, log-probabilities of generated tokens that the reader has not taken."""
        self.prompt_scores: dict[int, Scored] = {}
        """By index, those of the prompt's tokens."""
        self.on_end: Callable[[], None] | None = None
        """Called once, when the stream is over."""
        self._wake = wake
        self._detokenizer = detokenizer
        self._finder = (
            StopFinder(request.stop_strings, keep=request.include_stop_string) if request.stop_strings else None
        )
        self._outbox = Outbox()
        self._credit_portion = max(request.credit // (_PORTIONS * TOKEN_BYTES), 1)
        self._credit_returned = 0
        """Tokens whose credit went back."""
        self._writing = 0
        """Tokens handed out by `take` and not yet confirmed by `taken`."""
        self._flushed = False
        self._skip_tokens = self._skip_text = 0
        # Only with stop strings: for each token not yet let out, the length of the text before it.
        self._held: deque[int] = deque()
        self._text_length = 0

    @property
    def num_generated(self) -> int:
        """Tokens received from the core."""
        return len(self._outbox.tokens)

    @property
    def num_sent(self) -> int:
        """Tokens handed to the reader."""
        return self._outbox.taken

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._finder.match.stop_string if self._finder and self._finder.match else None

    @property
    def keep_tokens(self) -> int:
        """Generated tokens that count once a stop string was found: those that begin before the text's end."""
        return self._outbox.released

    @property
    def merged_tokens(self) -> int:
        """Tokens that went out in one message with an earlier one."""
        return self._outbox.merged

    def submission(self, now: float, *, again: bool = False) -> link_pb2.Submission:
        """The request with all tokens so far, for a core that does not know it. Starts the credit afresh.

        `again`: a core may know it already, from another submission.
        """
        request = self.request
        outbox = self._outbox
        waiting = outbox.released - outbox.taken + self._writing
        self._credit_returned = len(outbox.tokens) - waiting
        submission = link_pb2.Submission(
            stream=self.number,
            request_id=request.request_id,
            token_ids=request.prompt + to_column(outbox.tokens),
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            sampling=request.sampling,
            credit=max(request.credit - TOKEN_BYTES * waiting, 0),
            deadline_ns=left_ns(request.deadline, now),
            traceparent=request.traceparent,
            block_keys=request.block_keys,
            block_size=request.block_size,
            computes_whole_prompt=request.wants_prompt_scores,
            grammar=request.grammar,
            identity=request.identity,
            resume_info=request.resume_info,
            again=again,
            pooling=request.pooling,
        )
        request.scheduling.fill(submission, now)
        return submission

    def receive(self, first_index: int, token_ids: list[int], now: float) -> Received:
        """Takes tokens from the core, `first_index` being the index of the first one."""
        finder = self._finder
        if self.over or (finder is not None and finder.match is not None):
            return Received.TAKEN
        outbox = self._outbox
        known = len(outbox.tokens)
        if first_index != known:
            if first_index > known:
                return Received.GAP
            token_ids = token_ids[known - first_index :]
        if not token_ids:
            return Received.TAKEN
        if self.first_token_at is None:
            self.first_token_at = now
        if finder is None:
            outbox.tokens.extend(token_ids)
            outbox.released = len(outbox.tokens)
            self._wake()
            return Received.TAKEN
        return self._scan(token_ids, finder)

    def receive_scores(self, first_index: int, of_prompt: bool, scores: list[Scored]) -> None:
        """Takes log-probabilities from the core, those of generated tokens before the tokens themselves."""
        if of_prompt:
            self.prompt_scores.update(enumerate(scores, first_index))
        elif first_index >= len(self._outbox.tokens):
            self.scores.update(enumerate(scores, first_index))

    def finish(self, end: link_pb2.StreamEnd) -> None:
        """The core ended the stream."""
        if not self.over:
            self.end = end
            self._finish()

    def fail(self, error: QuireError) -> None:
        """The stream ends without the core."""
        if not self.over:
            self.error = error
            self._finish()

    def take(self) -> Batch | None:
        """What the reader gets next, or None while there is nothing. Confirm it with `taken`."""
        outbox = self._outbox
        if self._finder is None and outbox.released > outbox.taken:
            outbox.text = self._detokenizer.push(outbox.waiting)
        if self.over and not self._flushed:
            self._flushed = True
            self._flush()
        batch = outbox.take()
        if batch is not None:
            self._writing = len(batch.token_ids)
            if self._skip_tokens or self._skip_text:
                batch = self._without_known(batch)
        return batch

    def first_tokens(self, count: int) -> list[int]:
        """The first `count` tokens that it has."""
        return self._outbox.tokens[:count].tolist()

    def skip(self, tokens: int, text: int) -> None:
        """Leaves out the first `tokens` tokens and `text` bytes of text: the reader has them already."""
        self._skip_tokens, self._skip_text = tokens, text

    def _without_known(self, batch: Batch) -> Batch:
        """What of a batch the reader does not have. May be nothing at all."""
        known = min(max(self._skip_tokens - batch.first_index, 0), len(batch.token_ids))
        text = batch.text.encode()
        self._skip_text, text = max(self._skip_text - len(text), 0), text[self._skip_text :]
        if batch.first_index + len(batch.token_ids) >= self._skip_tokens:
            self._skip_tokens = 0
        return Batch(batch.first_index + known, batch.token_ids[known:], text.decode("utf-8", "replace"))

    def taken(self) -> None:
        """The reader has really taken the batch."""
        self._writing = 0

    def credit_due(self) -> int:
        """Bytes of credit to return now; 0 while it is not worth a message."""
        outbox = self._outbox
        consumed = len(outbox.tokens) - outbox.released + outbox.taken - self._writing
        due = consumed - self._credit_returned
        if due < self._credit_portion or self.over:
            return 0
        self._credit_returned += due
        return due * TOKEN_BYTES

    def _finish(self) -> None:
        self.over = True
        if self.on_end is not None:
            self.on_end()
        self._wake()

    def _scan(self, token_ids: list[int], finder: StopFinder) -> Received:
        outcome = Received.TAKEN
        for token_id in token_ids:
            self._outbox.tokens.append(token_id)
            self._held.append(self._text_length)
            text = self._detokenizer.push((token_id,))
            self._text_length += len(text)
            if len(self._outbox.tokens) <= self.request.min_tokens:
                finder.skip(text)
                self._let_out(text, finder.released)
                continue
            self._let_out(finder.push(text), finder.released)
            if finder.match is not None:
                outcome = Received.MATCHED
                break
        self._wake()
        return outcome

    def _let_out(self, text: str, length: int) -> None:
        """Lets out text, which is then `length` characters in all, with the tokens that begin before its end."""
        while self._held and self._held[0] < length:
            self._held.popleft()
            self._outbox.released += 1
        self._outbox.text += text

    def _flush(self) -> None:
        """At the end nothing is held back any longer; even the last character may complete a stop string."""
        finder = self._finder
        if finder is None:
            self._outbox.text += self._detokenizer.finish()
            return
        if finder.match is None:
            self._let_out(finder.push(self._detokenizer.finish()), finder.released)
        if finder.match is None:
            self._outbox.text += finder.finish()
            self._outbox.released = len(self._outbox.tokens)
