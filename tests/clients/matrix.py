"""The features in the matrix, the results of a run, and the tables in docs/clients.md."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

GROUPS = {
    "Requests": (
        "list models", "create", "stream", "async", "usage in stream", "n", "stop", "seed", "logprobs", "embeddings",
    ),
    "Tools, forms and conversations": (
        "tools: auto", "tools: required", "tools: named", "tool messages", "agent loop", "agent loop: echoes",
        "structured output", "reasoning", "previous_response_id", "count tokens",
    ),
    "Errors and cancellation": (
        "error: unknown model", "error: context overflow", "error: bad key", "error: in a stream", "cancel", "timeout",
    ),
}  # fmt: skip
"""Titles of the tables, and their features."""
FEATURES = tuple(feature for features in GROUPS.values() for feature in features)
NOT_PART = "not part of the client"
_CELLS = {"pass": "yes", "fail": "**no**", "absent": "–"}  # noqa: RUF001


@dataclass(frozen=True, slots=True)
class Outcome:
    """One client's outcome for one feature."""

    client: str
    version: str
    feature: str
    result: str
    """"pass", "fail" or "absent"."""
    reason: str = ""

    def __post_init__(self) -> None:
        """Check the names.

        Raises:
            ValueError: the feature or the result is unknown.
        """
        if self.feature not in FEATURES or self.result not in _CELLS:
            raise ValueError(f"{self.client}: unknown feature or result: {self.feature!r}, {self.result!r}")


Matrix = Mapping[str, Mapping[str, Outcome]]
"""Outcomes by client and feature."""


def matrix_of(outcomes: Iterable[Outcome]) -> Matrix:
    """Return the outcomes by client and feature; features that a client does not try are absent."""
    found: dict[str, dict[str, Outcome]] = {}
    for each in outcomes:
        found.setdefault(each.client, {})[each.feature] = each
    for client, tried in found.items():
        version = next(iter(tried.values())).version
        for feature in FEATURES:
            tried.setdefault(feature, Outcome(client, version, feature, "absent", NOT_PART))
    return found


def to_json(matrix: Matrix) -> str:
    """Return the matrix as a JSON document."""
    rows = [asdict(tried[feature]) for tried in matrix.values() for feature in FEATURES]
    return json.dumps(rows, indent=0, ensure_ascii=False) + "\n"


def read(path: Path) -> Matrix:
    """Read a matrix that `to_json` wrote."""
    return matrix_of(Outcome(**row) for row in json.loads(path.read_text()))


def tables(matrix: Matrix) -> str:
    """Return Markdown tables, and the reasons for features that do not work or do not exist."""
    lines: list[str] = []
    for title, features in GROUPS.items():
        lines += [f"### {title}", "", f"| | {' | '.join(features)} |", "|---|" + "---|" * len(features)]
        for client, tried in matrix.items():
            lines.append(f"| {client} | {' | '.join(_CELLS[tried[feature].result] for feature in features)} |")
        lines.append("")
    return "\n".join([*lines, *_reasons(matrix), *_versions(matrix)])


def _reasons(matrix: Matrix) -> list[str]:
    clients: dict[tuple[str, str, str], list[str]] = {}
    for client, tried in matrix.items():
        for feature in FEATURES:
            each = tried[feature]
            if each.result == "fail" or (each.result == "absent" and each.reason != NOT_PART):
                clients.setdefault((each.result, feature, each.reason), []).append(client)
    lines = ["### Reasons", "", "| feature | | reason | clients |", "|---|---|---|---|"]
    for (result, feature, reason), names in sorted(clients.items(), key=lambda item: FEATURES.index(item[0][1])):
        flat = " ".join(reason.replace("|", "\\|").split())
        lines.append(f"| {feature} | {_CELLS[result]} | {flat} | {'; '.join(names)} |")
    return [*lines, ""]


def _versions(matrix: Matrix) -> list[str]:
    lines = ["### Tested versions", "", "| client | packages |", "|---|---|"]
    lines += [f"| {client} | {next(iter(tried.values())).version} |" for client, tried in matrix.items()]
    return [*lines, ""]
