"""Book: the state of the journal, built from its batches: resumable requests and their generated tokens.

The module is pure: batches in, entries out. A batch that contradicts a request's state does not change the request.
Tokens after a gap are ignored, and so is an end that depends on them. The client then gets fewer tokens, but never
wrong tokens.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from protos.quire.journal.v1 import journal_pb2
from protos.quire.link.v1 import link_pb2
from scheduler_svc.core.interface.records import Log
from shared.columns import from_column, from_columns
from shared.frames import TOKEN_BYTES

_OVERHEAD = 256
"""Approximate overhead of an entry, in bytes."""
_SCORES_OVERHEAD = 16
"""Approximate overhead of one token's log-probabilities, in bytes."""


@dataclass(slots=True)
class Entry:
    """Entry of one request."""

    number: int
    submission: link_pb2.Submission
    """The submission, without its tokens."""
    tokens: "array[int]"
    """Prompt and generated tokens."""
    num_prompt_tokens: int
    """Copy of the submission's field for fast access, because every token needs it."""
    scores: list[tuple[int, bytes]] = field(default_factory=list)
    """(index among the generated tokens, log-probabilities); see `add_scores`."""
    score_bytes: int = 0
    """Approximate size of `scores` in bytes."""
    live: bool = True
    end: bytes = b""
    """Serialised StreamEnd if the request ended normally; empty otherwise."""
    ended_ms: int = 0
    """When the request ended, in ms since 1970; 0 while it is live."""
    model: str = ""
    segment: int = 0
    """Segment to which the whole entry was last written; used by the writer."""
    prepared: Log | None = None
    """The entry for the core, if it was decoded in advance; while the request is live, its tokens may be missing."""

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.num_prompt_tokens

    def add_scores(self, index: int, scores: bytes) -> int:
        """Add log-probabilities for generated tokens; return the increase of `size` in bytes."""
        self.scores.append((index, scores))
        grown = len(scores) + _SCORES_OVERHEAD
        self.score_bytes += grown
        return grown

    def whole_submission(self) -> link_pb2.Submission:
        """Return the submission with all its tokens."""
        submission = link_pb2.Submission()
        submission.CopyFrom(self.submission)
        submission.token_ids = self.tokens.tobytes()
        return submission

    def record(self) -> journal_pb2.Entry:
        whole = journal_pb2.Entry(number=self.number, model=self.model)
        whole.submission = self.whole_submission().SerializeToString()
        for index, scores in self.scores:
            whole.scores.add(first_index=index, scores=scores)
        if not self.live:
            whole.ended.end, whole.ended.unix_ms = self.end, self.ended_ms
        return whole

    @property
    def size(self) -> int:
        """Approximate size of `record` in bytes."""
        submission = self.submission
        opaque = len(submission.sampling) + len(submission.grammar) + len(submission.resume_info)
        return _OVERHEAD + opaque + TOKEN_BYTES * len(self.tokens) + self.score_bytes


class Book:
    """Entries by number, ordered by the time when each was last written completely, oldest first."""

    def __init__(self) -> None:
        # Use an OrderedDict, because finding the first entry of a dict scans all removed entries before it.
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._by_identity: dict[bytes, int] = {}
        self.last_ms = 0
        """Time of the newest batch, in ms since 1970."""
        self.num_bytes = 0
        """Total size of all entries in bytes, updated with each change because the journal reads it every turn."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, number: int) -> Entry | None:
        """Return the entry with this number."""
        return self._entries.get(number)

    def find(self, identity: bytes) -> Entry | None:
        """Return the entry with this identity."""
        return self._entries.get(self._by_identity.get(identity, 0))

    def apply(self, batch: journal_pb2.Batch, segment: int = 0) -> None:
        """Apply a batch of the segment with number `segment`.

        Raises:
            DecodeError, MalformedColumnError: the batch is malformed.
        """
        if batch.fresh:
            self._entries.clear()
            self._by_identity.clear()
            self.num_bytes = 0
        self.last_ms = batch.unix_ms
        for whole in batch.entries:
            self._enter(whole, segment)
        entries = self._entries
        if batch.numbers:
            columns = from_columns(batch.numbers, batch.indices, batch.tokens)
            for number, index, token in zip(*(column.tolist() for column in columns), strict=True):
                entry = entries.get(number)
                if entry is not None and index == len(entry.tokens) - entry.num_prompt_tokens:
                    entry.tokens.append(token)
                    self.num_bytes += TOKEN_BYTES
        for scores in batch.scores:
            entry = entries.get(scores.number)
            if entry is not None:
                self.num_bytes += entry.add_scores(scores.first_index, scores.scores)
        for ended in batch.ended:
            entry = entries.get(ended.number)
            if entry is not None:
                _end(entry, ended)
        for number in from_column(batch.dropped).tolist():
            self._remove(number)

    def _enter(self, whole: journal_pb2.Entry, segment: int) -> None:
        submission = link_pb2.Submission.FromString(whole.submission)
        tokens = array("i", from_column(submission.token_ids).tolist())
        submission.ClearField("token_ids")
        known = self._by_identity.get(submission.identity)
        if known is not None:
            self._remove(known)
        count = submission.num_prompt_tokens
        entry = Entry(whole.number, submission, tokens, count, model=whole.model, segment=segment)
        for scores in whole.scores:
            entry.add_scores(scores.first_index, scores.scores)
        if whole.HasField("ended"):
            _end(entry, whole.ended)
        self._remove(whole.number)
        self._entries[whole.number] = entry
        self._by_identity[submission.identity] = whole.number
        self.num_bytes += entry.size

    def _remove(self, number: int) -> None:
        entry = self._entries.pop(number, None)
        if entry is not None:
            del self._by_identity[entry.submission.identity]
            self.num_bytes -= entry.size


def _end(entry: Entry, ended: journal_pb2.Ended) -> None:
    entry.live, entry.ended_ms = False, ended.unix_ms
    if ended.end:
        counts_on = link_pb2.StreamEnd.FromString(ended.end).completion_tokens
        entry.end = ended.end if counts_on <= entry.num_generated else b""
