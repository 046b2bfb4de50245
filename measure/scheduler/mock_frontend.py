"""Front end of `measure.scheduler.takeover`: the real link to the scheduler with many streams, and no clients.

The process prints `running` when every stream has tokens. When every stream has a token of another scheduler, and after
some further time or when a file exists, it checks all tokens and prints one line of JSON (`Report`).
"""

import argparse
import asyncio
import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from measure.scheduler.mock_workers import BLOCK_SIZE, FINGERPRINT, VOCAB, token_at
from services.link.core_link import CoreLink
from services.streams.stream import Stream, StreamRequest
from services.text.detokenizer import Detokenizer
from shared.columns import to_column
from shared.logging import configure_logging
from shared.prefix_keys import following_keys, root_key
from shared.request_spec import RequestSpec

_CREDIT = 1 << 30
_TOGETHER = 64
"""Streams that are submitted in one iteration of the event loop."""
_RESUME_INFO = bytes(200)
_MORE_S = 2.0
"""Time for which streams continue before their tokens are checked, seconds."""


@dataclass(slots=True)
class Report:
    """Results of one front end. Times are monotonic, seconds."""

    pauses: list[float]
    """Time between the last token before the takeover and the first token after it, per stream."""
    went_on_at: list[float]
    """Time of the first token after the takeover, per stream."""
    tokens: int
    wrong_tokens: int
    """Tokens that are not the token of their position."""
    resubmitting_s: float
    """Longest iteration of the event loop from the loss of the scheduler on, seconds."""


class _NoText(Detokenizer):
    """Detokenizer of streams whose output is not taken."""

    def push(self, token_ids: Sequence[int]) -> str:
        raise NotImplementedError

    def finish(self) -> str:
        raise NotImplementedError


class Client:
    """The streams of one front end."""

    def __init__(self, address: str, index: int, streams: int, prompt_tokens: int, max_tokens: int) -> None:
        self._link = CoreLink(address, f"frontend-{index}", families=list, on_state=self._state_changed)
        self._is_ready = asyncio.Event()
        self._last = np.zeros(streams)
        self._before = np.zeros(streams)
        """Time of the last token before the takeover; 0 before the first token after it."""
        self._after = np.zeros(streams)
        self._num_waiting = streams
        """Streams without a token, and after the takeover those without a token since."""
        self._all_have_tokens, self._all_went_on = asyncio.Event(), asyncio.Event()
        rng = np.random.default_rng(index)
        root = root_key(FINGERPRINT, b"")
        self._firsts: list[int] = []
        self._prompt_tokens = prompt_tokens
        self._streams: list[Stream] = []
        for place in range(streams):
            tokens = rng.integers(3, VOCAB, prompt_tokens)
            prompt = to_column(tokens)
            spec = RequestSpec(
                request_id=f"req-{index:04d}-{place:024d}",
                num_prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                model=FINGERPRINT,
                identity=f"{index:04d}-{place:027d}".encode(),
                resume_info=_RESUME_INFO,
            )
            request = StreamRequest(
                spec=spec, prompt=prompt, credit=_CREDIT, arrival=time.monotonic(),
                block_keys=following_keys(root, prompt, BLOCK_SIZE), block_size=BLOCK_SIZE,
            )  # fmt: skip
            self._firsts.append(int(tokens[0]))
            self._streams.append(Stream(request, _NoText(), functools.partial(self._woken, place)))

    async def run(self, timeout_s: float, until: str) -> Report:
        """Submit the streams, wait for a takeover and for the file `until` if it is named, and return the results.

        Raises:
            TimeoutError: the streams do not run, or no other scheduler leads.
            RuntimeError: a stream has ended.
        """
        self._link.start()
        async with asyncio.timeout(timeout_s):
            await self._is_ready.wait()
            for begin in range(0, len(self._streams), _TOGETHER):
                for stream in self._streams[begin : begin + _TOGETHER]:
                    self._link.submit(stream)
                await asyncio.sleep(0.01)
            await self._all_have_tokens.wait()
            print("running", flush=True)
            longest_s = await self._longest_iteration()
        await asyncio.sleep(_MORE_S)
        if until:
            await asyncio.to_thread(_await_file, until)
        report = Report(
            pauses=(self._after - self._before).round(4).tolist(),
            went_on_at=self._after.round(4).tolist(),
            tokens=sum(stream.num_generated for stream in self._streams),
            wrong_tokens=sum(map(self._num_wrong, self._streams, self._firsts)),
            resubmitting_s=round(longest_s, 4),
        )
        await self._link.close()
        return report

    async def _longest_iteration(self) -> float:
        longest_s = 0.0
        while not self._all_went_on.is_set():
            began = time.monotonic()
            await asyncio.sleep(0.01)
            if not self._link.ready or self._link.num_restarts:
                longest_s = max(longest_s, time.monotonic() - began - 0.01)
        return longest_s

    def _state_changed(self) -> None:
        if self._link.ready:
            self._is_ready.set()

    def _woken(self, place: int) -> None:
        """Note a message with tokens of a stream."""
        stream = self._streams[place]
        if stream.over:
            raise RuntimeError(f"{stream.request.spec.request_id} has ended: {stream.end or stream.error}")
        now = time.monotonic()
        if not self._all_have_tokens.is_set():
            if not self._last[place]:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._all_have_tokens.set()
                    self._num_waiting = len(self._streams)
        elif self._link.num_restarts and not self._after[place]:
            self._before[place], self._after[place] = self._last[place], now
            self._num_waiting -= 1
            if not self._num_waiting:
                self._all_went_on.set()
        self._last[place] = now

    def _num_wrong(self, stream: Stream, first: int) -> int:
        tokens = np.array(stream.first_tokens(stream.num_generated))
        wanted = token_at(first, np.arange(self._prompt_tokens, self._prompt_tokens + len(tokens)))
        return int((tokens != wanted).sum())


def _await_file(name: str) -> None:
    while not os.path.exists(name):
        time.sleep(0.1)


async def _run(options: argparse.Namespace) -> Report:
    client = Client(options.address, options.index, options.streams, options.prompt_tokens, options.max_tokens)
    return await client.run(options.timeout_s, options.until)


def main() -> int:
    """Run one front end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--until", default="", help="continue until this file exists")
    options = parser.parse_args()
    configure_logging("mock-frontend")
    print(json.dumps(asdict(asyncio.run(_run(options)))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
