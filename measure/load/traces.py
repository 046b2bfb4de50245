"""Recorded traffic: readers for the published traces, and generators with their published statistics.

The traces have no texts. Prompts are random and have the recorded lengths. Prompts of a Mooncake trace share the same
blocks as the recorded ones. Quire does not include the files; `docs/benchmarking.md` lists where they are published.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from measure.load.arrivals import Gamma, Replay
from measure.load.workloads import UNITS, Drawn, Lengths, Session, Turn, Workload
from shared.config import ConfigError

BLOCK_TOKENS = 512
"""Number of tokens per block in a Mooncake trace."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of a trace."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Hashes of the prompt's blocks; equal hashes mean equal tokens. Empty if the trace has none."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests in a trace, ordered by time."""

    requests: tuple[Recorded, ...]
    seed: int = 0

    def arrivals(self, speed: float = 1.0) -> Replay:
        """Return the recorded arrival times; a speed of 2 replays the trace in half the time."""
        return Replay(tuple(each.time_s for each in self.requests), speed)

    def session(self, index: int) -> Session | None:
        """Return one request as a session of one turn."""
        if index >= len(self.requests):
            return None
        recorded = self.requests[index]
        parts = [_random([self.seed, 0, block], BLOCK_TOKENS) for block in recorded.blocks]
        known = min(len(parts) * BLOCK_TOKENS, recorded.input_tokens)
        own = _random([self.seed, 1, index], recorded.input_tokens - known)
        units = np.concatenate([*parts, own])[: recorded.input_tokens] if parts else own
        return Session((Turn(tuple(units.tolist()), recorded.output_tokens),))


@dataclass(frozen=True, slots=True)
class Statistics:
    """Published statistics for a trace, and the generator fitted to them."""

    inputs: Lengths
    outputs: Lengths
    gap_cv: float
    """Coefficient of variation of the gaps between arrivals."""
    prefix_share: float = 0.0
    """Share of prompt tokens that an unlimited prefix cache would find."""

    def workload(self, seed: int) -> Workload:
        """Return requests with these lengths and a shared prefix."""
        return Drawn(self.inputs, self.outputs, seed, prefix_share=self.prefix_share)

    def arrivals(self, rate: float) -> Gamma:
        """Return arrivals at this rate with this coefficient of variation."""
        return Gamma.of_cv(rate, self.gap_cv)


PUBLISHED: Mapping[str, Statistics] = {
    # Means and gap CVs from the Azure LLM inference traces 2023. The medians are from Splitwise (Patel et al., 2024).
    "azure-conversation": Statistics(
        Lengths.log_normal(mean=1155, median=1020), Lengths.log_normal(mean=211, median=129), gap_cv=1.09
    ),
    "azure-code": Statistics(
        Lengths.log_normal(mean=2048, median=1500), Lengths.log_normal(mean=28, median=13), gap_cv=13.2
    ),
    # Mean and ideal hit share from the Mooncake conversation trace. The CVs of its lengths and gaps are assumed to be
    # 1.
    "mooncake-conversation": Statistics(
        Lengths(mean=12035, cv=1.0), Lengths(mean=343, cv=1.0), gap_cv=1.0, prefix_share=0.366
    ),
}
"""The generators by name."""


def read_trace(path: Path, seed: int = 0) -> Trace:
    """Read an Azure trace (CSV, 2023 or 2024) or a Mooncake trace (JSON lines), uncompressed or as .gz.

    Raises:
        ConfigError: the file cannot be read, or has neither format; the message names the line.
    """
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            found = list(_mooncake(file, path) if first.lstrip().startswith("{") else _azure(file, path))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); use a trace of Azure or Mooncake") from None
    if not found:
        raise ConfigError(f"{path}: contains no request; use a trace of Azure or Mooncake")
    return Trace(tuple(sorted(found, key=lambda each: each.time_s)), seed)


def _azure(lines: Iterator[str], path: Path) -> Iterator[Recorded]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            time = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
            yield Recorded(time, max(int(row["ContextTokens"]), 1), max(int(row["GeneratedTokens"]), 1))
        except (KeyError, TypeError, ValueError):
            expected = "TIMESTAMP, ContextTokens and GeneratedTokens"
            raise ConfigError(f"{path}, line {number}: not a row of an Azure trace; it has {expected}") from None


def _mooncake(lines: Iterator[str], path: Path) -> Iterator[Recorded]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield Recorded(
                float(row["timestamp"]) / 1000,
                max(int(row["input_length"]), 1),
                max(int(row["output_length"]), 1),
                tuple(int(block) for block in row.get("hash_ids", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            expected = "timestamp, input_length and output_length"
            raise ConfigError(f"{path}, line {number}: not a line of a Mooncake trace; it has {expected}") from None


def _random(seed: list[int], count: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.random.default_rng(seed).integers(0, UNITS, count)
