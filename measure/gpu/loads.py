"""The requests of each item, and pure functions that compute metrics from token times."""

import random
import statistics
from collections.abc import Sequence

from measure.gpu.results import Figures
from measure.offline import OfflineRequest, Trace

_FIRST_TOKEN = 10
"""Ids below it are special."""


def decode_load(rows: int, context: int, output: int, vocab_size: int) -> list[OfflineRequest]:
    """Return `rows` prompts of `context` tokens, each with `output` tokens to generate, all at once."""
    rng = random.Random(rows * 1_000_003 + context)
    return [_request(rng, context, output, vocab_size) for _ in range(rows)]


def prefill_load(tokens: int, count: int, vocab_size: int) -> list[OfflineRequest]:
    """Return `count` prompts of `tokens` tokens, with one token each to generate."""
    rng = random.Random(tokens)
    return [_request(rng, tokens, 1, vocab_size) for _ in range(count)]


def nano_vllm_load(requests: int, shortest: int, longest: int, vocab_size: int) -> list[OfflineRequest]:
    """Return nano-vllm's benchmark: input and output lengths uniform between `shortest` and `longest`."""
    rng = random.Random(0)
    return [
        _request(rng, rng.randint(shortest, longest), rng.randint(shortest, longest), vocab_size)
        for _ in range(requests)
    ]


def sharegpt_like_load(requests: int, longest: int, vocab_size: int) -> list[OfflineRequest]:
    """Return requests with lengths like those of ShareGPT's conversations, cut at `longest`.

    The lengths are log-normal, with means of about 220 tokens in and 190 out; most are shorter. The texts do not
    matter, because the weights are random.
    """
    rng = random.Random(1)

    def length(median: float, spread: float) -> int:
        return max(4, min(longest, round(median * rng.lognormvariate(0.0, spread))))

    return [_request(rng, length(90, 1.3), length(110, 1.05), vocab_size) for _ in range(requests)]


def decode_figures(traces: Sequence[Trace]) -> Figures:
    """Return the tokens per second while all rows decode.

    The time runs from the last row's first token to the first row's last token.
    """
    begin = max(trace.times_s[0] for trace in traces)
    end = min(trace.times_s[-1] for trace in traces)
    tokens = sum(sum(begin < time_s <= end for time_s in trace.times_s) for trace in traces)
    steps = tokens / len(traces)
    if end <= begin or steps < 1:
        raise ValueError("the rows never all decoded together: give them more tokens")
    return {"decode_tok_per_s": tokens / (end - begin), "step_ms": 1e3 * (end - begin) / steps}


def prefill_figures(traces: Sequence[Trace]) -> Figures:
    """Return the median time to the first token, of requests sent one after the other."""
    return {"ttft_ms": 1e3 * statistics.median(trace.times_s[0] - trace.sent_s for trace in traces)}


def throughput_figures(requests: Sequence[OfflineRequest], traces: Sequence[Trace], wall_s: float) -> Figures:
    """Return the input and output tokens per second over the whole run."""
    out = sum(len(trace.times_s) for trace in traces)
    asked = sum(request.max_tokens for request in requests)
    if out != asked:
        raise ValueError(f"{out} tokens were generated, but {asked} were requested")
    return {
        "out_tok_per_s": out / wall_s,
        "total_tok_per_s": (out + sum(len(request.prompt) for request in requests)) / wall_s,
        "wall_s": wall_s,
    }


def _request(rng: random.Random, prompt: int, output: int, vocab_size: int) -> OfflineRequest:
    tokens = tuple(rng.randrange(_FIRST_TOKEN, vocab_size) for _ in range(prompt))
    return OfflineRequest(tokens, output, ignore_eos=True)
