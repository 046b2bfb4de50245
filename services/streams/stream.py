"""State of one client's stream, without I/O: converts tokens from the core to batches for the client.

Rules:
  * Only the core finishes a stream. Repeated calls of `finish` are ignored.
  * Every token has an index. Repeated tokens are ignored, and a gap is reported to the caller.
  * Without stop strings, tokens are detokenised only when they are sent, which is efficient for slow clients. With stop
    strings, every token is detokenised on arrival, so that the core can stop as early as possible.
  * If a stop string may still remove a token's text, the token is held back with its text, so that exactly the counted
    tokens are sent.
  * Credit is returned after the client has read a token or the stream has dropped it, in portions of a quarter.
"""

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from protos.quire.link.v1 import link_pb2
from services.parsers import Event, OutputParser
from services.requests.output import OutputRules
from services.requests.scheduling import DueTimes, left_ns
from services.streams.logprobs import Scored
from services.streams.outbox import Batch, Outbox
from services.streams.parts import size_of, without_first
from services.text.detokenizer import Detokenizer
from services.text.stop_strings import StopFinder
from shared.columns import to_column
from shared.errors import QuireError
from shared.frames import TOKEN_BYTES
from shared.request_spec import RequestSpec

_PORTIONS = 4
"""Credit is returned in this many portions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """Request to the core, fixed before it is submitted."""

    spec: RequestSpec
    prompt: bytes = field(repr=False)
    """Column of the prompt's tokens."""
    output: OutputRules = field(default_factory=OutputRules)
    choice: int = 0
    """Index of the choice."""
    credit: int
    """Maximum amount of output that the client has not read, bytes."""
    arrival: float
    """Monotonic time at which the RPC arrived, seconds."""
    due: DueTimes = field(default_factory=DueTimes)
    block_keys: bytes = field(default=b"", repr=False)
    """Joined keys of the prompt's full blocks, which have `block_size` tokens; may be empty."""
    block_size: int = 0
    tokenise_s: float = 0.0
    """Time that tokenising took, seconds."""
    grammar_s: float = 0.0
    """Time that the check of its grammar took, seconds."""
    resumed: bool = False
    """Whether it resumes a retained request, which a core may already have."""

    def for_choice(self, choice: int, sampling: bytes, identity: bytes) -> "StreamRequest":
        """Return the same request for another choice; only the first one returns the prompt's log-probabilities."""
        spec = self.spec._replace(sampling=sampling, identity=identity, computes_whole_prompt=False)
        return replace(self, choice=choice, spec=spec)


class Received(enum.Enum):
    """Result of receiving tokens from the core."""

    TAKEN = "taken"
    MATCHED = "matched"
    """A stop string was found; the caller must notify the core."""
    GAP = "gap"
    """Tokens are missing; the caller must submit the stream again."""


class Stream:
    """One live request."""

    __slots__ = (
        "_credit_portion", "_credit_returned", "_detokenizer", "_finder", "_flushed", "_held", "_outbox", "_parser",
        "_skip_parts", "_skip_text", "_skip_tokens", "_text_length", "_to_text", "_wake", "_writing", "end", "ended_at",
        "error", "number", "on_end", "over", "prompt_scores", "request", "scores", "submitted", "submitted_at",
    )  # fmt: skip

    def __init__(
        self,
        request: StreamRequest,
        detokenizer: Detokenizer,
        wake: Callable[[], None],
        parser: OutputParser | None = None,
    ) -> None:
        """Create a stream without output.

        Args:
            request: the request.
            detokenizer: converts its tokens.
            wake: called when there is output to take, and at the end.
            parser: parses its text; None if all text is content.
        """
        self.request = request
        self.number = 0
        """Number of the stream on the link, new at each submission."""
        self.submitted = False
        """Whether it was submitted and not refused, so that a core may have accepted it."""
        self.submitted_at = 0.0
        """Time of the last submission, monotonic seconds; 0 if none."""
        self.ended_at = 0.0
        """When the core reported the stream's end, monotonic seconds; 0 before that."""
        self.end: link_pb2.StreamEnd | None = None
        """The end that the core sent, or None."""
        self.error: QuireError | None = None
        """The error that ended the stream without the core, or None."""
        self.over = False
        """Whether the stream has ended; `take` may still return output."""
        self.scores: dict[int, Scored] = {}
        """Log-probabilities of generated tokens that were not sent yet, by token index."""
        self.prompt_scores: dict[int, Scored] = {}
        """Log-probabilities of prompt tokens, by token index."""
        self.on_end: Callable[[], None] | None = None
        """Called once when the stream ends."""
        self._wake = wake
        self._detokenizer = detokenizer
        self._parser = parser
        rules = request.output
        self._to_text = None if rules.stop_strings else detokenizer.push
        """Converts tokens when they are sent; None if they are converted on arrival."""
        self._finder = StopFinder(rules.stop_strings, keep=rules.include_stop_string) if rules.stop_strings else None
        self._outbox = Outbox()
        self._credit_portion = max(request.credit // (_PORTIONS * TOKEN_BYTES), 1)
        self._credit_returned = 0
        """Number of tokens whose credit was returned."""
        self._writing = 0
        """Number of tokens returned by `take` and not confirmed by `taken`."""
        self._flushed = False
        self._skip_tokens = self._skip_text = 0
        self._skip_parts: int | None = 0
        # For each token that is not yet sent, the length of the text before it. Used only with stop strings.
        self._held: deque[int] = deque()
        self._text_length = 0

    @property
    def has_parser(self) -> bool:
        """Whether the text is parsed; otherwise all of it is content."""
        return self._parser is not None

    @property
    def num_generated(self) -> int:
        """Number of tokens received from the core."""
        return len(self._outbox.tokens)

    @property
    def num_sent(self) -> int:
        """Number of tokens given to the reader."""
        return self._outbox.taken

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._finder.match.stop_string if self._finder and self._finder.match else None

    @property
    def keep_tokens(self) -> int:
        """Number of generated tokens that begin before the matched stop string."""
        return self._outbox.released

    @property
    def merged_tokens(self) -> int:
        """Number of tokens that shared a message with an earlier one."""
        return self._outbox.merged

    def submission(self, now: float) -> link_pb2.Submission:
        """Return the submission with all tokens so far, for a core that does not know the stream. Reset the credit.

        Repeated submissions are marked as accepted by a core. It is unknown whether the lost core had accepted the
        request, but a few excess requests in the next core's queue are better than a lost request.
        """
        request = self.request
        outbox = self._outbox
        waiting = outbox.released - outbox.taken + self._writing
        self._credit_returned = len(outbox.tokens) - waiting
        self.submitted_at = now
        submission = link_pb2.Submission(
            stream=self.number,
            token_ids=request.prompt + to_column(outbox.tokens),
            credit=max(request.credit - TOKEN_BYTES * waiting, 0),
            deadline_ns=left_ns(request.due.deadline, now),
            ttft_target_ns=left_ns(request.due.first_token, now),
            total_time_target_ns=left_ns(request.due.last_token, now),
            block_keys=request.block_keys,
            block_size=request.block_size,
            again=self.submitted or request.resumed,
            accepted=self.submitted,
            **request.spec._asdict(),
        )
        self.submitted = True
        return submission

    def receive(self, first_index: int, token_ids: list[int]) -> Received:
        """Add tokens from the core; `first_index` is the index of the first token."""
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
        if finder is None:
            outbox.tokens.fromlist(token_ids)
            outbox.released = known + len(token_ids)
            self._wake()
            return Received.TAKEN
        return self._scan(token_ids, finder)

    def receive_scores(self, first_index: int, of_prompt: bool, scores: list[Scored]) -> None:
        """Add log-probabilities from the core. Those for generated tokens arrive before the tokens."""
        if of_prompt:
            self.prompt_scores.update(enumerate(scores, first_index))
        elif first_index >= len(self._outbox.tokens):
            self.scores.update(enumerate(scores, first_index))

    def finish(self, end: link_pb2.StreamEnd) -> None:
        """End the stream with the core's end."""
        if not self.over:
            self.end = end
            self._finish()

    def fail(self, error: QuireError) -> None:
        """End the stream with an error, without the core."""
        if not self.over:
            self.error = error
            self._finish()

    def take(self) -> Batch | None:
        """Return the next batch for the client, or None if there is none. The caller confirms it with `taken`."""
        outbox = self._outbox
        if outbox.released == outbox.taken and not outbox.text and (self._flushed or not self.over):
            return None
        if self.over and not self._flushed:
            if self._finder is None:
                outbox.text = self._detokenizer.push(outbox.waiting)
            self._flushed = True
            self._flush()
            batch = outbox.take()
        else:
            batch = outbox.take(self._to_text)
        if self._parser is not None:
            batch = self._parsed(batch, self._parser)
        if batch is not None:
            self._writing = len(batch.token_ids)
            if self._skip_tokens or self._skip_text:
                batch = self._without_known(batch)
        return batch

    def first_tokens(self, count: int) -> list[int]:
        return self._outbox.tokens[:count].tolist()

    def skip(self, tokens: int, text: int, parts: int | None = None) -> None:
        """Skip the output that the client already has.

        Args:
            tokens: number of tokens.
            text: bytes of text.
            parts: size of the parser's parts (`services.streams.parts`) to skip; None for all parts in the skipped
                text.
        """
        self._skip_tokens, self._skip_text, self._skip_parts = tokens, text, parts

    def _without_known(self, batch: Batch) -> Batch:
        """Return the part of a batch that the client does not have, which may be empty."""
        known = min(max(self._skip_tokens - batch.first_index, 0), len(batch.token_ids))
        text = batch.text.encode()
        self._skip_text, text = max(self._skip_text - len(text), 0), text[self._skip_text :]
        if batch.first_index + len(batch.token_ids) >= self._skip_tokens:
            self._skip_tokens = 0
        rest = text.decode("utf-8", "replace")
        return Batch(batch.first_index + known, batch.token_ids[known:], rest, batch.events)

    def _parsed(self, batch: Batch | None, parser: OutputParser) -> Batch | None:
        """Return a batch with the parser's results for its text, including held-back results at the end."""
        text = batch.text if batch is not None else ""
        events: list[Event] = []
        if self._skip_parts is None:
            encoded = text.encode()
            parser.push(encoded[: self._skip_text].decode("utf-8", "replace"))
            text = encoded[self._skip_text :].decode("utf-8", "replace")
            if text:
                self._skip_parts = 0
        if text:
            events = parser.push(text)
        if self._flushed:
            events += parser.finish()
        if self._skip_parts:
            size = size_of(events)
            events = without_first(events, self._skip_parts)
            self._skip_parts = max(self._skip_parts - size, 0)
        if batch is not None:
            return batch._replace(events=events)
        return Batch(self._outbox.taken, [], "", events) if events else None

    def taken(self) -> bool:
        """Confirm that the last batch was sent to the client; return whether credit may be due."""
        self._writing = 0
        outbox = self._outbox
        return len(outbox.tokens) - outbox.released + outbox.taken - self._credit_returned >= self._credit_portion

    def credit_due(self) -> int:
        """Return the bytes of credit to return now; 0 while there are too few for a message."""
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
            if len(self._outbox.tokens) <= self.request.output.min_tokens:
                finder.skip(text)
                self._release(text, finder.released)
                continue
            self._release(finder.push(text), finder.released)
            if finder.match is not None:
                outcome = Received.MATCHED
                break
        self._wake()
        return outcome

    def _release(self, text: str, length: int) -> None:
        """Release text and the tokens that start before its end; `length` is the total length of released text."""
        while self._held and self._held[0] < length:
            self._held.popleft()
            self._outbox.released += 1
        self._outbox.text += text

    def _flush(self) -> None:
        """Release everything that was held back. The last character may still complete a stop string."""
        finder = self._finder
        if finder is None:
            self._outbox.text += self._detokenizer.finish()
            return
        if finder.match is None:
            self._release(finder.push(self._detokenizer.finish()), finder.released)
        if finder.match is None:
            self._outbox.text += finder.finish()
            self._outbox.released = len(self._outbox.tokens)
