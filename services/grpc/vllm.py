"""`vllm.grpc.engine.VllmEngine`: the protocol between routers and vLLM's engines, so that a router can use Quire.

The messages come from the package smg-grpc-proto. Without this package, the service is not offered. Generate, Embed,
Abort, HealthCheck, GetModelInfo, GetServerInfo, GetLoads and GetTokenizer are supported. KV cache transfers, media and
profiling are rejected.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from google.protobuf import message_factory

from quire import __version__
from quire.v1 import generation_pb2 as v1
from services.access.principals import CURRENT
from services.calls.context import Services
from services.calls.embeddings import Embedder
from services.calls.generation import Generator
from services.calls.tracing import rpc
from services.errors import RequestCancelledError
from services.grpc.boundary import Context, make_caller
from services.text.tokenizer_archive import pack_tokenizer
from shared.errors import FieldViolation, InvalidRequestError, UnsupportedFieldError
from shared.model_path import resolve_model

try:
    from smg_grpc_proto import vllm_engine_pb2 as pb
    from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
except ImportError:  # The extra "vllm-protocol" is not installed.
    pb = pb_grpc = None

SERVICE = "vllm.grpc.engine.VllmEngine"
_SNAPSHOT_TIMEOUT_S = 1.0
_MAX_INT32 = 0x7FFFFFFF
_CONSTRAINTS = {"json_schema": "json_schema", "regex": "regex", "grammar": "ebnf", "json_object": "json_object"}
_REASONS = {v1.FINISH_REASON_STOP: "stop", v1.FINISH_REASON_LENGTH: "length"}


def add_vllm_service(server: Any, services: Services, generator: Generator, embedder: Embedder) -> bool:
    """Register the service if its messages are installed; return whether they were."""
    if pb_grpc is None:
        return False
    servicer = type("VllmServicer", (VllmEngine, pb_grpc.VllmEngineServicer), {})(services, generator, embedder)
    pb_grpc.add_VllmEngineServicer_to_server(servicer, server)
    return True


class VllmEngine:
    """vLLM engine service of one front-end process."""

    def __init__(self, services: Services, generator: Generator, embedder: Embedder) -> None:
        self._services = services
        self._generator = generator
        self._embedder = embedder
        self._folder = resolve_model(services.config.model, weights=False).resolve()
        self._started = time.time()
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Running requests by principal and id. A router uses one connection and therefore reaches only this process.
        """

    async def Generate(self, request: Any, context: Context) -> None:
        """Generate output. Send chunks if `stream` is set, and each complete choice when it ends."""
        wanted, caller = to_request(request), make_caller(context, rpc("Generate", SERVICE))
        answers = _Answers(request.stream, context.write)
        task = asyncio.create_task(self._generator.run(wanted, caller, answers.send))
        key = (caller.principal, wanted.request_id)
        self._running.setdefault(key, task)
        try:
            await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            assert current is not None
            # The client disconnected, or the front end is shutting down.
            if current.cancelling() or not task.cancelled():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise
            raise RequestCancelledError("the request was aborted") from None
        finally:
            if self._running.get(key) is task:
                del self._running[key]

    async def Abort(self, request: Any, context: Context) -> Any:
        """Abort requests of the caller. Unknown ids are ignored, because their requests have already ended."""
        for request_id in request.request_ids:
            task = self._running.get((CURRENT.get().name, request_id))
            if task is not None:
                task.cancel()
        return pb.AbortResponse()

    async def Embed(self, request: Any, context: Context) -> Any:
        """Return the normalised hidden state of the prompt's last token."""
        wanted = v1.EmbedRequest(request_id=request.request_id)
        wanted.inputs.add().token_ids.ids.extend(request.tokenized.input_ids)
        response = await self._embedder.run(wanted, make_caller(context, rpc("Embed", SERVICE)))
        (embedding,) = response.embeddings
        return pb.EmbedResponse(
            embedding=embedding.values,
            prompt_tokens=response.usage.prompt_tokens,
            embedding_dim=len(embedding.values),
        )

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        """Return whether requests can be served now."""
        ready = self._services.link.ready
        return pb.HealthCheckResponse(
            healthy=ready, message="ready" if ready else "not ready: no usable worker or no connection to the scheduler"
        )

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        """Return the description of the served model."""
        model = self._services.served_model()
        return pb.GetModelInfoResponse(
            # A router on this machine reads the tokenizer from this folder. Other routers call GetTokenizer.
            model_path=str(self._folder),
            tokenizer_path=str(self._folder),
            served_model_name=model.name,
            is_generation=True,
            max_context_length=model.max_model_len,
            max_req_input_len=model.max_model_len - 1,
            vocab_size=model.vocab_size,
            architectures=[model.architecture],
            eos_token_ids=model.eos_token_ids,
            default_sampling_params_json=json.dumps(dict(self._services.defaults.values)),
        )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        """Return the description of this server."""
        model = self._services.served_model()
        return pb.GetServerInfoResponse(
            active_requests=len(self._running),
            last_receive_timestamp=time.time(),
            uptime_seconds=time.time() - self._started,
            server_type="quire-grpc",
            data_parallel_size=1,
            block_size=model.block_size,
            model_dtype=model.dtype,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: Any, context: Context) -> Any:
        """Return the load of the scheduler, summed over all workers."""
        totals: dict[str, float] = {}
        for family in await self._services.link.snapshot(_SNAPSHOT_TIMEOUT_S) or ():
            for sample in family.samples:
                name = sample.name + (f":{sample.labels['state']}" if "state" in sample.labels else "")
                totals[name] = totals.get(name, 0.0) + sample.value
        running, waiting = (
            int(totals.get("vllm:num_requests_running", 0)),
            int(totals.get("vllm:num_requests_waiting", 0)),
        )
        blocks = totals.get("quire_kv_blocks:total", 0.0)
        held = totals.get("quire_kv_blocks:held", 0.0)
        model = self._services.link.model
        block_size = model.block_size if model is not None else 0
        load = pb.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=min(int(held * block_size), _MAX_INT32),
            max_total_num_tokens=min(int(blocks * block_size), _MAX_INT32),
            token_usage=held / blocks if blocks else 0.0,
        )
        timestamp = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=timestamp, version=__version__, dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, request: Any, context: Context) -> None:
        """Stream the tokenizer's files as a zip archive; the last chunk carries its SHA-256."""
        # The package does not export the module that defines this message.
        method = pb.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name["GetTokenizer"]
        chunk_type = message_factory.GetMessageClass(method.output_type)
        archive = await asyncio.to_thread(pack_tokenizer, self._folder)
        *others, last = archive.chunks()
        for chunk in others:
            await context.write(chunk_type(data=chunk))
        await context.write(chunk_type(data=last, sha256=archive.sha256))


class _Answers:
    """Converts Quire's messages to vLLM's and writes them."""

    def __init__(self, stream: bool, write: Callable[[Any], Awaitable[object]]) -> None:
        self._stream = stream
        self._write = write
        self._choices: dict[int, Any] = {}
        self._ended: dict[int, v1.ChoiceFinished] = {}
        self._input_logprobs: Any = None

    async def send(self, message: v1.GenerateResponse) -> None:
        """Convert and write the next message."""
        match message.WhichOneof("event"):
            case "delta":
                await self._delta(message.delta)
            case "prompt":
                self._input_logprobs = _input_logprobs(message.prompt)
            case "choice_finished":
                self._ended[message.choice_finished.choice] = message.choice_finished
            case "finished":
                await self._finish(message.finished)

    async def _delta(self, delta: v1.Delta) -> None:
        complete = self._choices.setdefault(delta.choice, pb.GenerateComplete(index=delta.choice))
        complete.output_ids.extend(delta.token_ids)
        complete.completion_tokens += len(delta.token_ids)
        if delta.logprobs:
            _add_logprobs(complete.output_logprobs, delta.logprobs)
        if not self._stream or not delta.token_ids:
            return
        chunk = pb.GenerateStreamChunk(
            token_ids=delta.token_ids, index=delta.choice, completion_tokens=complete.completion_tokens
        )
        if delta.logprobs:
            _add_logprobs(chunk.output_logprobs, delta.logprobs)
        await self._write(pb.GenerateResponse(chunk=chunk))

    async def _finish(self, finished: v1.Finished) -> None:
        usage = finished.usage
        for choice in sorted(self._choices) or [0]:
            complete = self._choices.get(choice) or pb.GenerateComplete(index=choice)
            end: Any = self._ended.get(choice, finished)
            complete.finish_reason = _REASONS.get(end.reason, "error")
            match end.WhichOneof("stop"):
                case "stop_string":
                    complete.matched_stop_str = end.stop_string
                case "stop_token_id":
                    complete.matched_token_id = end.stop_token_id
            complete.prompt_tokens, complete.cached_tokens = usage.prompt_tokens, usage.cached_prompt_tokens
            if self._input_logprobs is not None:
                complete.input_logprobs.CopyFrom(self._input_logprobs)
            await self._write(pb.GenerateResponse(complete=complete))


def to_request(request: Any) -> v1.GenerateRequest:
    """Convert a vLLM request to a GenerateRequest.

    Raises:
        InvalidRequestError: a value is out of range.
        UnsupportedFieldError: the request holds media, or KV cache of another engine.
    """
    for name in ("mm_inputs", "media_refs", "kv_transfer_params"):
        if request.HasField(name):
            raise UnsupportedFieldError(name)
    theirs = request.sampling_params
    ours = v1.GenerateRequest(request_id=request.request_id)
    match request.WhichOneof("input"):
        case "tokenized":
            ours.token_ids.ids.extend(request.tokenized.input_ids)
        case "text":
            ours.text = request.text
    sampling, stop, output = ours.sampling, ours.stop, ours.output
    if theirs.HasField("temperature"):
        sampling.temperature = theirs.temperature
    if theirs.top_k:
        sampling.top_k = theirs.top_k if theirs.top_k <= _MAX_INT32 else 0  # The unsigned value of -1 means all tokens.
    sampling.frequency_penalty, sampling.presence_penalty = theirs.frequency_penalty, theirs.presence_penalty
    for name in ("top_p", "min_p", "repetition_penalty", "n"):
        if getattr(theirs, name):  # In proto3, 0 means "not set".
            setattr(sampling, name, getattr(theirs, name))
    if theirs.HasField("seed"):
        sampling.seed = theirs.seed & 0xFFFFFFFFFFFFFFFF
    for token_id, bias in theirs.logit_bias.items():
        if token_id < 0:
            raise InvalidRequestError(FieldViolation("sampling_params.logit_bias", f"{token_id} is not a token id"))
        sampling.logit_bias[token_id] = bias
    if theirs.HasField("max_tokens"):
        stop.max_tokens = theirs.max_tokens
    stop.min_tokens, stop.ignore_eos = theirs.min_tokens, theirs.ignore_eos
    stop.stop_strings.extend(theirs.stop)
    stop.stop_token_ids.extend(theirs.stop_token_ids)
    stop.include_stop_string = theirs.include_stop_str_in_output
    output.include_special_tokens = not theirs.skip_special_tokens
    for name in ("logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
        if theirs.HasField(name):
            value = getattr(theirs, name)
            if value < 0:
                raise InvalidRequestError(FieldViolation(f"sampling_params.{name}", "must not be negative"))
            setattr(output, name, value)
    kind = theirs.WhichOneof("constraint")
    if kind == "choice":
        ours.grammar.choice.choices.extend(theirs.choice.choices)
    elif kind in _CONSTRAINTS:
        setattr(ours.grammar, _CONSTRAINTS[kind], getattr(theirs, kind))
    elif kind is not None:
        raise UnsupportedFieldError(f"sampling_params.{kind}")
    return ours


def _add_logprobs(target: Any, entries: Any) -> None:
    for entry in entries:
        target.token_logprobs.append(entry.token.logprob)
        target.token_ids.append(entry.token.token_id)
        target.top_logprobs.add(values=[t.logprob for t in entry.top], token_ids=[t.token_id for t in entry.top])


def _input_logprobs(prompt: v1.Prompt) -> Any:
    message = pb.InputLogProbs(token_ids=prompt.token_ids)
    for index, entry in enumerate(prompt.logprobs):
        message.token_logprobs.add(**({"value": entry.token.logprob} if index else {}))
        message.top_logprobs.add(values=[t.logprob for t in entry.top], token_ids=[t.token_id for t in entry.top])
    return message
