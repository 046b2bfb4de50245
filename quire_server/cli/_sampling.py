"""Flags of `quire generate` and `quire chat` that control sampling."""

from collections.abc import Sequence
from typing import Any

from quire_server.cli._parser import Namespace, OneLineParser

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "seed")


def add_sampling_flags(parser: OneLineParser) -> None:
    """Add the flags of `SAMPLING`."""
    add = parser.add_argument
    add("--max-tokens", type=int, metavar="N", help="maximum number of tokens to generate")
    add(
        "--temperature",
        type=float,
        metavar="T",
        help="sampling temperature; 0 is greedy (default: the model's, else 1)",
    )
    add("--top-k", type=int, metavar="K", help="sample from the k most likely tokens")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the smallest set of tokens whose total probability reaches P",
    )
    add("--min-p", type=float, metavar="P", help="drop tokens less likely than P times the most likely one")
    add("--seed", type=int, metavar="N", help="seed for random sampling, for repeatable responses")


def given_options(options: Namespace, names: Sequence[str]) -> Any:
    """Return a dictionary with only the options that the user specified."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}
