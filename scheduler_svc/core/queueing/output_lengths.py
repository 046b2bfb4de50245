"""Output lengths: how many tokens a request will generate, predicted from similar finished requests.

The scheduler reads no text. It identifies an application by the key of the prompt's first block, because applications
begin their prompts with the same system prompt. It also knows the tenant, the class, the sizes of the prompt and of
`max_tokens`, and whether a grammar constrains the output. For every combination in `_likenesses`, the lengths of the
last `_SAMPLES` finished requests are stored. The forecast uses the most specific combination with enough samples. A
request that has generated tokens is compared only with requests that generated more, because a request that has
exceeded the usual length is likely to be long.
"""

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from scheduler_svc.core.requests.request import Request
from shared.prefix_keys import KEY_BYTES

_SAMPLES = 64
_ENOUGH = 8
"""Minimum number of finished requests for using a combination."""
_ENOUGH_LONGER = 4
"""Minimum number of these requests that must have generated more tokens than the request."""
_MAX_KEYS = 4096
"""Maximum number of stored combinations. The least recently used one is dropped."""

_Likeness = tuple[str | int | bytes, ...]


class _Samples:
    """The lengths of the newest finished requests with equal properties."""

    __slots__ = ("ascending", "newest")

    def __init__(self) -> None:
        self.newest: deque[int] = deque(maxlen=_SAMPLES)
        self.ascending: list[int] = []
        """The same lengths in order; empty if it must be sorted again."""

    def add(self, length: int) -> None:
        self.newest.append(length)
        self.ascending = []

    def in_order(self) -> list[int]:
        if not self.ascending:
            self.ascending = sorted(self.newest)
        return self.ascending


class OutputLengths:
    """Lengths of finished requests, by shared properties."""

    def __init__(self) -> None:
        """Start without lengths."""
        self._samples: OrderedDict[_Likeness, _Samples] = OrderedDict()

    def finished(self, request: Request) -> None:
        """Record the output length of a completed request."""
        generated = request.num_generated
        for key in _likenesses(request):
            samples = self._samples.get(key)
            if samples is None:
                samples = self._samples[key] = _Samples()
                if len(self._samples) > _MAX_KEYS:
                    self._samples.popitem(last=False)
            else:
                self._samples.move_to_end(key)
            samples.add(generated)

    def like(self, request: Request, num_generated: int = 0) -> Sequence[int]:
        """Return the lengths of similar finished requests, ascending; empty if too few are known.

        Args:
            request: the request.
            num_generated: tokens that it has generated; only longer outputs are returned.
        """
        few: list[int] = []
        for key in _likenesses(request):
            samples = self._samples.get(key)
            if samples is None:
                continue
            longer = samples.in_order()
            if num_generated:
                longer = longer[bisect_right(longer, num_generated) :]
            if len(samples.newest) >= _ENOUGH and len(longer) >= _ENOUGH_LONGER:
                return longer
            few = longer or few
        # The last one is the most general: all finished requests.
        return few


def quantile(values: Sequence[int], share: float) -> float:
    """Return the value that this share of the ascending values does not exceed."""
    return values[min(int(share * len(values)), len(values) - 1)]


def _likenesses(request: Request) -> Iterator[_Likeness]:
    """Return the properties that the request shares with others, most specific first."""
    spec = request.spec
    tenant, size = spec.tenant, spec.num_prompt_tokens.bit_length()
    kind = (tenant, spec.request_class, spec.max_tokens.bit_length(), bool(spec.grammar))
    first_block = next(iter(request.keys.values()), b"")[:KEY_BYTES]
    if first_block:
        yield (*kind, first_block)
    yield (*kind, size)
    yield tenant, size
    yield (tenant,)
    yield ()
