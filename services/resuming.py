"""Going on with a request whose client lost its connection: on any front end, from any token on.

The core keeps the log of such a request (tokens, log-probabilities, how it ended). A front end that is asked for it
makes streams that have these tokens already, leaves out what the client has, and submits again what was not over. Since
the noise of a token depends on its position alone, the answer is that of an undisturbed run.
"""

from collections.abc import Callable
from hashlib import sha256

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from services.core_link import CoreLink
from services.errors import RETRY_MS
from services.logprobs import read_scores
from services.scheduling import SchedulingWishes, block_keys
from services.stream import Stream, StreamRequest
from services.tokenizer import TextTokenizer
from services.validation import MAX_CHOICES
from shared.columns import from_column
from shared.errors import FieldViolation, InvalidRequestError, NotReadyError, RequestNotFoundError

_TIMEOUT_S = 5.0


def identity_of(principal: str, request_id: str, choice: int) -> bytes:
    """What one choice of a request is known by, on every front end."""
    return sha256(f"{principal}\0{request_id}\0{choice}".encode()).digest()


def resume_info(request: v1.GenerateRequest) -> bytes:
    """What another front end must know beside what the core knows: how tokens become messages."""
    info = v1.GenerateRequest(stop=request.stop, output=request.output)
    info.sampling.n = request.sampling.n if request.sampling.HasField("n") else 1
    info.stop.ClearField("stop_token_ids")
    return info.SerializeToString()


async def kept_of(link: CoreLink, principal: str, request_id: str) -> list[link_pb2.ResumeReply]:
    """What the core keeps of each choice of a request; whoever had it has it no longer.

    Raises:
        RequestNotFoundError: nothing, or not everything.
        NotReadyError: the core does not answer.
    """
    replies: list[link_pb2.ResumeReply] = []
    count = 1
    while len(replies) < count:
        reply = await link.ask_resume(identity_of(principal, request_id, len(replies)), _TIMEOUT_S)
        if reply is None:
            raise NotReadyError("the scheduler is away; try again in a moment", retry_ms=RETRY_MS)
        if reply.not_found:
            raise RequestNotFoundError("nothing is known, or kept any longer, of a resumable request with this id")
        if not replies:
            count = min(info_of(reply).sampling.n, MAX_CHOICES)
        replies.append(reply)
    return replies


def info_of(reply: link_pb2.ResumeReply) -> v1.GenerateRequest:
    """What `resume_info` said of the request."""
    return v1.GenerateRequest.FromString(reply.submission.resume_info)


def stream_of(
    reply: link_pb2.ResumeReply,
    choice: int,
    tokenizer: TextTokenizer,
    model: link_pb2.ServedModel,
    *,
    credit: int,
    arrival: float,
    traceparent: str,
    wake: Callable[[], None],
) -> Stream:
    """A stream that has what is kept of a choice, its end included if it has one."""
    submission, info = reply.submission, info_of(reply)
    size = 4 * submission.num_prompt_tokens
    prompt, output = submission.token_ids[:size], from_column(submission.token_ids[size:]).tolist()
    request = StreamRequest(
        request_id=submission.request_id,
        prompt=prompt,
        max_tokens=submission.max_tokens,
        stop_token_ids=submission.stop_token_ids,
        sampling=submission.sampling,
        grammar=submission.grammar,
        identity=submission.identity,
        resume_info=submission.resume_info,
        wants_scores=info.output.HasField("logprobs"),
        choice=choice,
        stop_strings=tuple(dict.fromkeys(info.stop.stop_strings)),
        include_stop_string=info.stop.include_stop_string,
        min_tokens=info.stop.min_tokens,
        credit=credit,
        arrival=arrival,
        traceparent=traceparent,
        scheduling=SchedulingWishes(
            tenant=submission.tenant,
            request_class=submission.request_class,
            priority=submission.priority,
            expected_output_tokens=submission.expected_output_tokens,
            cache_scope=submission.cache_scope,
        ),
        block_keys=block_keys(model, submission.cache_scope, prompt),
        block_size=model.block_size,
    )
    skip_special_tokens = not info.output.include_special_tokens
    stream = Stream(request, tokenizer.detokenizer(skip_special_tokens=skip_special_tokens), wake)
    for scores in reply.scores:
        stream.receive_scores(scores.first_index, False, read_scores(scores.scores))
    if output:
        stream.receive(0, output, arrival)
    if reply.HasField("end"):
        stream.finish(reply.end)
    return stream


def skip_known(
    stream: Stream, info: v1.GenerateRequest, tokenizer: TextTokenizer, tokens: int, text: int | None
) -> None:
    """Leaves out what the client has: so many tokens, and bytes of text (None: what is certain with these tokens).

    Raises:
        InvalidRequestError: more than there is.
    """
    if tokens > stream.num_generated:
        description = f"{tokens} for choice {stream.request.choice}, which has {stream.num_generated} tokens so far"
        raise InvalidRequestError(FieldViolation("from_tokens", description))
    if text is None:
        detokenizer = tokenizer.detokenizer(skip_special_tokens=not info.output.include_special_tokens)
        text = len(detokenizer.push(stream.first_tokens(tokens)).encode())
    stream.skip(tokens, text)
