"""Resumes a request after its client lost the connection, on any front end and at any token.

The core keeps a log of each resumable request: tokens, log-probabilities, finish reason. A front end that resumes a
request restores its streams from the log, skips the output that the client already has, and resubmits unfinished
streams. A token's random noise depends only on seed, choice and position, so the output equals that of an uninterrupted
run.
"""

from collections.abc import Callable
from hashlib import sha256

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from services.calls.context import Services
from services.errors import RETRY_MS
from services.link.core_link import CoreLink
from services.requests.output import output_rules
from services.requests.scheduling import block_keys
from services.requests.tools import new_parser, read_tools, shown_tokens
from services.requests.validation import MAX_CHOICES
from services.streams.logprobs import read_scores
from services.streams.stream import Stream, StreamRequest
from services.text.tokenizer import TextTokenizer
from shared.columns import from_column
from shared.errors import FieldViolation, InvalidRequestError, NotReadyError, RequestNotFoundError
from shared.request_spec import read_spec

_TIMEOUT_S = 5.0
_PROMPT_END_BYTES = 64
"""Number of bytes at the end of the prompt's token column in which the last marker lies."""


def request_identity(principal: str, request_id: str, choice: int) -> bytes:
    """Return the identity of one choice, which is the same on every front end."""
    return sha256(f"{principal}\0{request_id}\0{choice}".encode()).digest()


def resume_info(request: v1.GenerateRequest) -> bytes:
    """Return the data that another front end needs in addition to the core's log: how tokens become messages."""
    info = v1.GenerateRequest(stop=request.stop, output=request.output)
    info.sampling.n = request.sampling.n if request.sampling.HasField("n") else 1
    info.stop.ClearField("stop_token_ids")
    if request.output.parse and request.HasField("chat"):
        info.chat.SetInParent()
        info.chat.tools_json = request.chat.tools_json
        info.chat.tool_choice.CopyFrom(request.chat.tool_choice)
    if request.output.parse and request.HasField("grammar"):
        info.grammar.json_object = True  # From here on, the code only checks whether a grammar is set.
    return info.SerializeToString()


async def fetch_resume_replies(link: CoreLink, principal: str, request_id: str) -> list[link_pb2.ResumeReply]:
    """Fetch the core's log for each choice of a request, and take the request over from the previous client.

    Raises:
        RequestNotFoundError: the core lacks the log of a choice.
        NotReadyError: the core did not respond in time.
    """
    replies: list[link_pb2.ResumeReply] = []
    count = 1
    while len(replies) < count:
        reply = await link.ask_resume(request_identity(principal, request_id, len(replies)), _TIMEOUT_S)
        if reply is None:
            raise NotReadyError("scheduler not connected; try again in a moment", retry_ms=RETRY_MS)
        if reply.not_found:
            raise RequestNotFoundError(
                "request_id: no resumable request with this id is running or stored; send the request as a new one"
            )
        if not replies:
            count = min(read_resume_info(reply).sampling.n, MAX_CHOICES)
        replies.append(reply)
    return replies


def read_resume_info(reply: link_pb2.ResumeReply) -> v1.GenerateRequest:
    return v1.GenerateRequest.FromString(reply.submission.resume_info)


def restore_stream(
    reply: link_pb2.ResumeReply,
    choice: int,
    services: Services,
    model: link_pb2.ServedModel,
    *,
    credit: int,
    arrival: float,
    traceparent: str,
    wake: Callable[[], None],
) -> Stream:
    """Return a stream restored from the log of a choice, including its end."""
    submission, info = reply.submission, read_resume_info(reply)
    size = 4 * submission.num_prompt_tokens
    prompt, output = submission.token_ids[:size], from_column(submission.token_ids[size:]).tolist()
    spec = read_spec(submission)._replace(traceparent=traceparent, computes_whole_prompt=False)
    tools = read_tools(info, services.model_format)
    rules = output_rules(info, shown_tokens(info, tools, services.model_format))
    request = StreamRequest(
        spec=spec,
        prompt=prompt,
        output=rules,
        choice=choice,
        credit=credit,
        arrival=arrival,
        block_keys=block_keys(model, spec.cache_scope, prompt),
        block_size=model.block_size,
        resumed=True,
    )
    detokenizer = services.tokenizer.detokenizer(
        skip_special_tokens=rules.skip_special_tokens, shown=rules.shown_tokens
    )
    reasons = services.begins_in_reasoning(from_column(prompt[-_PROMPT_END_BYTES:]).tolist())
    stream = Stream(request, detokenizer, wake, new_parser(info, tools, services.model_format, reasons=reasons))
    for scores in reply.scores:
        stream.receive_scores(scores.first_index, False, read_scores(scores.scores))
    if output:
        stream.receive(0, output)
    if reply.HasField("end"):
        stream.finish(reply.end)
    return stream


def skip_known(stream: Stream, tokenizer: TextTokenizer, tokens: int, text: int | None, parts: int | None) -> None:
    """Skip the output that the client already has.

    Args:
        stream: a restored stream.
        tokenizer: detokenises the skipped tokens.
        tokens: number of tokens to skip.
        text: number of text bytes to skip; None for the text that belongs to these tokens.
        parts: size of the parts to skip; None for the parts that belong to the skipped text.

    Raises:
        InvalidRequestError: the stream has fewer tokens.
    """
    if tokens > stream.num_generated:
        description = f"{tokens} is too large: choice {stream.request.choice} has {stream.num_generated} tokens so far"
        raise InvalidRequestError(FieldViolation("from_tokens", description))
    if text is None:
        rules = stream.request.output
        detokenizer = tokenizer.detokenizer(skip_special_tokens=rules.skip_special_tokens, shown=rules.shown_tokens)
        text = len(detokenizer.push(stream.first_tokens(tokens)).encode())
    stream.skip(tokens, text, parts)
