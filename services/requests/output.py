"""Rules for converting a request's generated tokens to messages; only front ends read them."""

from dataclasses import dataclass, field

from quire.v1 import generation_pb2 as v1


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRules:
    """Rules for the output of one request, the same for all its choices."""

    stop_strings: tuple[str, ...] = field(default=(), repr=False)
    include_stop_string: bool = False
    """Whether a matched stop string stays in the text."""
    min_tokens: int = 0
    """Stop strings are ignored within this number of tokens."""
    skip_special_tokens: bool = True
    shown_tokens: tuple[str, ...] = ()
    """Special tokens that are shown in the text because a parser reads them."""
    parse: bool = False
    """Whether to send the output as parts in addition to text."""
    logprobs: bool = False
    """Whether log-probabilities of generated tokens are requested."""


def output_rules(request: v1.GenerateRequest, shown_tokens: tuple[str, ...]) -> OutputRules:
    """Return the rules for a valid request, or for the `resume_info` of a retained request."""
    stop, output = request.stop, request.output
    return OutputRules(
        stop_strings=tuple(dict.fromkeys(stop.stop_strings)),
        include_stop_string=stop.include_stop_string,
        min_tokens=stop.min_tokens,
        skip_special_tokens=not output.include_special_tokens,
        shown_tokens=shown_tokens,
        parse=output.parse,
        logprobs=output.HasField("logprobs"),
    )
