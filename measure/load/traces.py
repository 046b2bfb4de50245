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
from measure.load.workloads import UNITS, Agents, Drawn, Lengths, Pauses, Session, Turn, Workload
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

    def workload(self, seed: int, scale: float = 1.0) -> Workload:
        """Return requests with `scale` times these lengths and a shared prefix."""
        return Drawn(self.inputs.scaled(scale), self.outputs.scaled(scale), seed, prefix_share=self.prefix_share)

    def arrivals(self, rate: float) -> Gamma:
        """Return arrivals at this rate with this coefficient of variation."""
        return Gamma.of_cv(rate, self.gap_cv)


@dataclass(frozen=True, slots=True)
class CodingAgents:
    """Sessions of coding agents with the statistics of TraceLab (Zhu et al., 2026, arXiv 2606.30560).

    TraceLab recorded 4,265 sessions of Claude Code and Codex. The statistics are those of its repository
    `uw-syfi/TraceLab`:

    * Turns per session: 82.5 on average (73.6 after tools, 8.9 after persons), with a median of 16.
    * New tokens: mean and median of the tokens that a step appends to a prefix of 128k to 256k tokens (Claude). They
      include the previous output, so a session grows somewhat faster here.
    * Output tokens: mean over all steps, and median of Claude.
    * Pauses: a median of 0.3 s and a mean of 16.8 s for tools; a median of 86 s and a mean of 2,401 s (Claude) for
      persons.

    The length of the system prompt with its tool definitions is an assumption.
    """

    def workload(self, seed: int, scale: float = 1.0, longest_pause_s: float = 60.0) -> Workload:
        """Return sessions with `scale` times these lengths; longer pauses are cut to `longest_pause_s`."""
        return Agents(
            system=max(1, round(12_000 * scale)),
            new=Lengths.log_normal(mean=1400, median=710).scaled(scale),
            outputs=Lengths.log_normal(mean=523, median=252).scaled(scale),
            turns=Lengths.log_normal(mean=82.5, median=16),
            tool_s=Pauses.log_normal(mean=16.8, median=0.3, longest=longest_pause_s),
            person_s=Pauses.log_normal(mean=2401, median=86, longest=longest_pause_s),
            person_share=8.9 / 82.5,
            seed=seed,
        )

    def arrivals(self, rate: float) -> Gamma:
        """Return Poisson arrivals of sessions."""
        return Gamma.of_cv(rate, 1.0)


PUBLISHED: Mapping[str, Statistics | CodingAgents] = {
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
    "coding-agents": CodingAgents(),
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
