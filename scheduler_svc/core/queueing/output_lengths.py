"""Output lengths: how many tokens a request will generate, predicted from similar finished requests.

The scheduler reads no text. It identifies an application by the key of the prompt's first block, because applications
begin their prompts with the same system prompt. It also knows the tenant, the class, the sizes of the prompt and of
`max_tokens`, and whether a grammar constrains the output. For every combination in `_likenesses`, the lengths of the
last `_SAMPLES` finished requests are stored. The forecast uses the most specific combination with enough samples. A
request that has generated tokens is compared only with requests that generated more, because a request that has
exceeded the usual length is likely to be long.
"""

from bisect import bisect_right
from collections import OrderedDict
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


class OutputLengths:
    """Lengths of finished requests, by shared properties."""

    def __init__(self) -> None:
        """Start without lengths."""
        self._samples: OrderedDict[_Likeness, list[int]] = OrderedDict()
        self._sorted: dict[_Likeness, list[int]] = {}
        """The samples of some combinations in ascending order, because many requests may arrive before one ends."""

    def finished(self, request: Request) -> None:
        """Record the output length of a completed request."""
        generated, known = request.num_generated, self._samples
        for key in _likenesses(request):
            self._sorted.pop(key, None)
            samples = known.get(key)
            if samples is None:
                known[key] = [generated]
                if len(known) > _MAX_KEYS:
                    self._sorted.pop(known.popitem(last=False)[0], None)
                continue
            known.move_to_end(key)
            samples.append(generated)
            if len(samples) > _SAMPLES:
                del samples[0]

    def like(self, request: Request, num_generated: int = 0) -> Sequence[int]:
        """Return the lengths of similar finished requests, ascending; empty if too few are known.

        Args:
            request: the request.
            num_generated: number of tokens that it has generated; only longer outputs are returned.
        """
        few: list[int] = []
        if not self._samples:
            return few
        for key in _likenesses(request):
            samples = self._sorted.get(key)
            if samples is None:
                if key not in self._samples:
                    continue
                samples = self._sorted[key] = sorted(self._samples[key])
            longer = samples[bisect_right(samples, num_generated) :] if num_generated else samples
            if len(samples) >= _ENOUGH and len(longer) >= _ENOUGH_LONGER:
                return longer
            few = longer or few
        # The last entry is the most general, because it includes all finished requests.
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
