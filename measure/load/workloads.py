"""Workloads: the lengths and traits of a benchmark's requests. Pure and seeded.

A workload is a numbered list of sessions. A session has one or more turns; a turn's prompt is the previous
conversation, followed by the turn's new part. A single request is a session with one turn. Session number i depends
only on the seed and on i, so that each of several processes can generate its part.

New parts of prompts are units in [0, UNITS). `prompts` converts a unit into one token id or one word.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from shared.config import ConfigError
from shared.json_text import describe_json_error

_T = TypeVar("_T")

UNITS = 1 << 16
"""Number of distinct units."""

_SESSION, _PREFIX, _TRAITS, _MIX = range(4)
"""Leading numbers of seeds, so that random streams for different purposes differ."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    prompt: tuple[int, ...]
    """New units after the conversation so far."""
    output_tokens: int
    """Maximum number of generated tokens."""
    pause_s: float = 0.0
    """Time from the previous turn's end to this turn's intended start, for example for a tool call, in seconds."""
    text: str = ""
    """New text, for prompts from a file; replaces the units."""


@dataclass(frozen=True, slots=True)
class Session:
    """The turns of one conversation, in order."""

    turns: tuple[Turn, ...]


class Workload(Protocol):
    """A source of sessions, which are numbered from 0."""

    def session(self, index: int) -> Session | None:
        """Return one session; None after the last session of a finite workload."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens."""

    low: int = 0
    high: int = 0
    """Bounds of a uniform distribution. Equal bounds mean a fixed length. Unused if `mean` is set."""
    mean: float = 0.0
    cv: float = 0.0
    """Mean and coefficient of variation of a log-normal distribution."""

    @classmethod
    def fixed(cls, tokens: int) -> "Lengths":
        """Return a distribution with one fixed length."""
        return cls(tokens, tokens)

    @classmethod
    def log_normal(cls, *, mean: float, median: float) -> "Lengths":
        """Return the log-normal distribution with this mean and median."""
        return cls(mean=mean, cv=math.sqrt((mean / median) ** 2 - 1))

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parse "128", "64-512" (uniform) or "lognormal:MEAN:CV".

        Raises:
            ValueError: the text has none of these forms.
        """
        kind, *numbers = text.split(":")
        if kind == "lognormal" and len(numbers) == 2:
            mean, cv = (float(number) for number in numbers)
            if not (mean >= 1 and cv > 0):
                raise ValueError(text)
            return cls(mean=mean, cv=cv)
        low, _, high = text.partition("-")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(text)
        return lengths

    def scaled(self, factor: float) -> "Lengths":
        """Return the distribution of lengths that are `factor` times as long, at least 1."""
        low, high = (max(1, round(each * factor)) if each else 0 for each in (self.low, self.high))
        return Lengths(low, high, self.mean * factor, self.cv)

    def __str__(self) -> str:
        if self.mean:
            return f"{self.mean:g} ± {self.mean * self.cv:.0f}"
        return f"{self.low}" if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, rng: np.random.Generator) -> int:
        """Return one length, at least 1."""
        if not self.mean:
            return int(rng.integers(self.low, self.high + 1)) if self.high > self.low else self.low
        return max(1, round(_log_normal(rng, self.mean, self.cv)))


_ONE = Lengths.fixed(1)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Sessions with random prompts whose lengths have the given distributions.

    Prompts may share prefixes: the first turn begins with one of `prefixes` fixed prefixes. The prefix has
    `prefix_tokens` tokens in addition to the input length, or takes the fraction `prefix_share` of the input length.
    """

    inputs: Lengths
    """New prompt tokens of a turn."""
    outputs: Lengths
    """Generated tokens of a turn."""
    seed: int = 0
    turns: Lengths = _ONE
    """Turns of a session."""
    pause_s: float = 0.0
    """Mean pause between turns, seconds; exponentially distributed."""
    prefixes: int = 1
    """Number of different shared prefixes."""
    prefix_tokens: int = 0
    prefix_share: float = 0.0

    def session(self, index: int) -> Session:
        rng = np.random.default_rng([self.seed, _SESSION, index])
        turns = []
        for number in range(self.turns.draw(rng)):
            length, output = self.inputs.draw(rng), self.outputs.draw(rng)
            prefix: tuple[int, ...] = ()
            if number == 0 and (self.prefix_tokens or self.prefix_share):
                shared = self.prefix_tokens or round(self.prefix_share * length)
                length -= 0 if self.prefix_tokens else shared
                # Each prefix has its own generator, so that a short prefix is the start of a longer one.
                prefix = _units(np.random.default_rng([self.seed, _PREFIX, int(rng.integers(self.prefixes))]), shared)
            pause = float(rng.exponential(self.pause_s)) if number and self.pause_s else 0.0
            turns.append(Turn(prefix + _units(rng, length), output, pause))
        return Session(tuple(turns))


@dataclass(frozen=True, slots=True)
class Agents:
    """Sessions of agents: many turns, each after a tool or a person has answered.

    All sessions begin with the same system prompt and tool definitions.
    """

    system: int
    """Tokens that all sessions share."""
    new: Lengths
    """New prompt tokens of a turn: a person's request, or the output of tools."""
    outputs: Lengths
    turns: Lengths
    tool_s: "Pauses"
    person_s: "Pauses"
    person_share: float
    """Share of turns that a person begins; tools begin the others."""
    seed: int = 0

    def session(self, index: int) -> Session:
        # Prompts have a generator of their own, so that the lengths do not change the numbers of turns and the pauses.
        rng, own = (np.random.default_rng([self.seed, _SESSION, index, part]) for part in range(2))
        shared = _units(np.random.default_rng([self.seed, _PREFIX, 0]), self.system)
        turns = []
        for number in range(self.turns.draw(rng)):
            new, output = self.new.draw(rng), self.outputs.draw(rng)
            pauses = self.person_s if rng.random() < self.person_share else self.tool_s
            pause_s = pauses.draw(rng) if number else 0.0
            turns.append(Turn((() if number else shared) + _units(own, new), output, pause_s))
        return Session(tuple(turns))


@dataclass(frozen=True, slots=True)
class Pauses:
    """A log-normal distribution of pauses, in seconds. Longer pauses than `longest` last so long."""

    mean: float
    cv: float
    longest: float

    @classmethod
    def log_normal(cls, *, mean: float, median: float, longest: float) -> "Pauses":
        """Return the log-normal distribution with this mean and median."""
        return cls(mean, math.sqrt((mean / median) ** 2 - 1), longest)

    def draw(self, rng: np.random.Generator) -> float:
        """Return one pause."""
        return min(self.longest, _log_normal(rng, self.mean, self.cv))


@dataclass(frozen=True, slots=True)
class Mixed:
    """Mixture of two workloads, such as long prompts among short ones."""

    usual: Workload
    other: Workload
    other_share: float
    """Probability that a session comes from `other`."""
    seed: int = 0

    def session(self, index: int) -> Session | None:
        is_other = np.random.default_rng([self.seed, _MIX, index]).random() < self.other_share
        return (self.other if is_other else self.usual).session(index)


@dataclass(frozen=True, slots=True)
class Listed:
    """A finite list of sessions, for example from a file."""

    sessions: tuple[Session, ...]

    def session(self, index: int) -> Session | None:
        return self.sessions[index] if index < len(self.sessions) else None


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a session's requests other than lengths."""

    tenant: str = ""
    priority: int = 0
    cancel_at: float | None = None
    """Fraction of the output after which the client cancels the session's first turn; None for never."""


@dataclass(frozen=True, slots=True)
class TraitMix:
    """Distribution of the traits."""

    tenants: Mapping[str, float] = field(default_factory=dict)
    """For each tenant, its weight; empty for no tenant."""
    priorities: Mapping[int, float] = field(default_factory=dict)
    """For each priority, its weight; empty for priority 0."""
    cancel_ratio: float = 0.0
    """Probability that a session is cancelled."""
    seed: int = 0

    def draw(self, index: int) -> Traits:
        """Return the traits of one session."""
        rng = np.random.default_rng([self.seed, _TRAITS, index])
        tenant_at, priority_at, cancelled, cancel_at = rng.random(4).tolist()
        return Traits(
            _weighted(self.tenants, tenant_at, ""),
            _weighted(self.priorities, priority_at, 0),
            cancel_at if cancelled < self.cancel_ratio else None,
        )


def read_prompts(path: Path, default_output_tokens: int) -> Listed:
    """Read prompts from a file.

    Each line is a JSON object with "prompt" or "prompt_token_ids" and optionally "max_tokens".

    Raises:
        ConfigError: the file cannot be read, or a line is invalid; the message names the line.
    """
    return Listed(
        tuple(Session((_prompt(value, where, default_output_tokens),)) for where, value in read_json_lines(path))
    )


def read_json_lines(path: Path, name: str = "") -> list[tuple[str, Any]]:
    """Return the values in a file with one JSON value per line, each with its position for errors.

    Raises:
        ConfigError: the file cannot be read, a line is not JSON, or there is none; the message begins with the name.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{name}{path}: cannot be read ({reason}); use a file of JSON lines in UTF-8") from None
    found = []
    for number, line in enumerate(lines, 1):
        where = f"{name}{path}, line {number}"
        if line.strip():
            try:
                found.append((where, json.loads(line)))
            except ValueError as error:
                raise ConfigError(f"{where}: {describe_json_error(error)}") from None
    if not found:
        raise ConfigError(f"{name}{path}: contains no request; write one JSON object per line")
    return found


def _prompt(values: Any, where: str, default_output_tokens: int) -> Turn:
    if not isinstance(values, dict) or not ("prompt" in values) ^ ("prompt_token_ids" in values):
        raise ConfigError(f"{where}: invalid; write an object with either prompt or prompt_token_ids")
    try:
        tokens = tuple(int(token) for token in values.get("prompt_token_ids", ()))
        return Turn(tokens, int(values.get("max_tokens", default_output_tokens)), text=str(values.get("prompt", "")))
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: a field has the wrong type; max_tokens is a number, ids are a list") from None


def _log_normal(rng: np.random.Generator, mean: float, cv: float) -> float:
    sigma = math.sqrt(math.log(1 + cv**2))
    return float(rng.lognormal(math.log(mean) - sigma**2 / 2, sigma))


def _units(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, UNITS, count).tolist())


def _weighted(weights: Mapping[_T, float], at: float, default: _T) -> _T:
    """Return the value at this position in [0, 1) of the cumulative weights."""
    left = at * sum(weights.values())
    for value, weight in weights.items():
        left -= weight
        if left < 0:
            return value
    return default
