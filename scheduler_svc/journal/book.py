"""What a sequence of batches says is known: requests whose clients may come back, and what each has generated.

Pure: batches in, entries out. A batch that contradicts what is known changes nothing for the request concerned: tokens
that do not join on to those before are left out, and so is an end that counts on them. Its client gets less, never
something else.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from protos.quire.journal.v1 import journal_pb2
from protos.quire.link.v1 import link_pb2
from shared.columns import from_column, from_columns

_OVERHEAD = 256
"""What an entry takes beside its parts, bytes, roughly."""


@dataclass(slots=True)
class Entry:
    """One request."""

    number: int
    submission: link_pb2.Submission
    """Without its tokens."""
    tokens: "array[int]"
    """Prompt and generated tokens."""
    num_prompt_tokens: int
    """As the submission says; here because it is asked for with every token."""
    scores: list[tuple[int, bytes]] = field(default_factory=list)
    """(index among the generated tokens, log-probabilities)."""
    live: bool = True
    end: bytes = b""
    """A serialized StreamEnd, if it ended well."""
    ended_ms: int = 0
    """When it was live for the last time, milliseconds since 1970; 0: it is."""
    model: str = ""
    segment: int = 0
    """Where it was last written as a whole; for whoever writes."""

    @property
    def num_generated(self) -> int:
        """Tokens beyond the prompt."""
        return len(self.tokens) - self.num_prompt_tokens

    def whole_submission(self) -> link_pb2.Submission:
        """The submission with all tokens that it has."""
        submission = link_pb2.Submission()
        submission.CopyFrom(self.submission)
        submission.token_ids = self.tokens.tobytes()
        return submission

    def record(self) -> journal_pb2.Entry:
        """All of it."""
        whole = journal_pb2.Entry(number=self.number, model=self.model)
        whole.submission = self.whole_submission().SerializeToString()
        for index, scores in self.scores:
            whole.scores.add(first_index=index, scores=scores)
        if not self.live:
            whole.ended.end, whole.ended.unix_ms = self.end, self.ended_ms
        return whole

    @property
    def size(self) -> int:
        """Bytes, roughly, that `record` takes."""
        submission = self.submission
        opaque = len(submission.sampling) + len(submission.grammar) + len(submission.resume_info)
        return _OVERHEAD + opaque + 4 * len(self.tokens) + sum(len(scores) + 16 for _, scores in self.scores)


class Book:
    """Entries by number, that which was last written as a whole longest ago first."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._by_identity: dict[bytes, int] = {}
        self.last_ms = 0
        """When the newest batch was written."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, number: int) -> Entry | None:
        """The request of this number."""
        return self._entries.get(number)

    def find(self, identity: bytes) -> Entry | None:
        """The request of this identity."""
        return self._entries.get(self._by_identity.get(identity, 0))

    def apply(self, batch: journal_pb2.Batch, segment: int = 0) -> None:
        """Takes in what a batch says; `segment` is where it stands.

        Raises:
            DecodeError, MalformedColumnError: it is none of ours.
        """
        if batch.fresh:
            self._entries.clear()
            self._by_identity.clear()
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
        for scores in batch.scores:
            entry = entries.get(scores.number)
            if entry is not None:
                entry.scores.append((scores.first_index, scores.scores))
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
        entry.scores = [(scores.first_index, scores.scores) for scores in whole.scores]
        if whole.HasField("ended"):
            _end(entry, whole.ended)
        self._remove(whole.number)
        self._entries[whole.number] = entry
        self._by_identity[submission.identity] = whole.number

    def _remove(self, number: int) -> None:
        entry = self._entries.pop(number, None)
        if entry is not None:
            del self._by_identity[entry.submission.identity]


def _end(entry: Entry, ended: journal_pb2.Ended) -> None:
    entry.live, entry.ended_ms = False, ended.unix_ms
    if ended.end:
        counts_on = link_pb2.StreamEnd.FromString(ended.end).completion_tokens
        entry.end = ended.end if counts_on <= entry.num_generated else b""
