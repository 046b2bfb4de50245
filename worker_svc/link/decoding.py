"""Converts protobuf messages of the scheduler to values, and validates them against the worker's limits.

Other modules do not repeat these checks. A field that violates the plan protocol raises `PlanError` with a one-line
message without prompt content.
"""

import math
from hashlib import sha256

import numpy as np
from google.protobuf.message import DecodeError

from protos.quire.plan.v1 import plan_pb2
from shared.columns import MalformedColumnError, from_column, from_columns
from shared.frames import MAX_LOGPROBS
from shared.prefix_keys import KEY_BYTES
from worker_svc.interface.arrays import NO_IDS, NO_ROWS, Int32Array, IntArray
from worker_svc.interface.disk import DiskAction, DiskBlock, DiskJob
from worker_svc.interface.errors import PlanError
from worker_svc.interface.grammar import Grammar, GrammarRequest
from worker_svc.interface.limits import Limits
from worker_svc.interface.plan import (
    NO_LOGPROBS,
    Admission,
    BlockCopies,
    Plan,
    Pooling,
    Rules,
    SamplingParams,
    StateCopies,
    StateSaves,
)

_DISK_ACTIONS = {plan_pb2.DiskAction.Value(f"DISK_ACTION_{action.name}"): action for action in DiskAction}
_INT32_MAX = 0x7FFFFFFF


def decode_plan(message: plan_pb2.Plan, limits: Limits) -> Plan:
    """Decode a plan and check it against the worker's limits.

    Raises:
        PlanError: the plan violates the protocol.
    """
    try:
        chunk_rows, chunk_lengths = _chunks(message, limits)
        append_rows, append_blocks, append_windows = _appends(message, limits)
        draft_rows, draft_limits = _draft_limits(message, limits)
        leaves = _rows(message.leaves, "leave", limits)
        state_saves, host_saves = _state_saves(message, leaves, limits)
        kept_states = _kept_states(message, host_saves, limits)
        return Plan(
            step=message.step,
            leaves=leaves,
            admissions=tuple([_admission(admission, limits) for admission in message.admissions]),
            append_rows=append_rows,
            append_blocks=append_blocks,
            append_windows=append_windows,
            chunk_rows=chunk_rows,
            chunk_lengths=chunk_lengths,
            holds=_rows(message.holds, "hold", limits),
            releases=_rows(message.releases, "release", limits),
            traceparent=message.traceparent,
            swap_out=_swap_out(message.swap_out_blocks, message.swap_out_host_blocks, limits),
            swap_in=_swap_in(message, limits),
            block_copies=_block_copies(message, limits),
            copy_ids=_ids(message.copy_ids),
            draft_rows=draft_rows,
            draft_limits=draft_limits,
            state_saves=state_saves,
            host_saves=host_saves,
            kept_states=kept_states,
        )
    except MalformedColumnError as error:
        raise PlanError(str(error)) from None


def decode_frame(frame: bytes, limits: Limits) -> Plan:
    """Decode the plan in a frame of the scheduler, which another rank has received and checked.

    Raises:
        PlanError: the plan violates the protocol.
    """
    return decode_plan(plan_pb2.SchedulerMessage.FromString(frame).plan, limits)


def decode_grammar_request(message: plan_pb2.PrepareGrammar) -> GrammarRequest:
    """Decode a request to compile a grammar."""
    return GrammarRequest(decode_grammar(message.key, message.grammar), tuple(message.drop))


def decode_disk_job(message: plan_pb2.DiskJob, limits: Limits) -> DiskJob:
    """Decode a job of the disk, and check it against the worker's limits.

    Raises:
        PlanError: the job violates the protocol.
    """
    action = _DISK_ACTIONS.get(message.action)
    if action is None or not message.copy_id:
        raise PlanError("its action or its ID is missing")
    if action is DiskAction.CLEAR:
        return DiskJob(copy_id=message.copy_id, action=action)
    blocks = message.blocks
    try:
        host_blocks, slots = from_columns(message.host_blocks, blocks.slots)
    except MalformedColumnError as error:
        raise PlanError(str(error)) from None
    num_blocks = len(slots)
    if not num_blocks or _outside(slots, limits.num_disk_blocks) or _outside(host_blocks, limits.num_host_blocks):
        raise PlanError(f"a slot is outside [0, {limits.num_disk_blocks}), or a host block does not exist")
    if len(np.unique(slots)) < num_blocks or len(np.unique(host_blocks)) < num_blocks:
        raise PlanError("a slot or a host block appears twice")
    if {len(blocks.keys), len(blocks.roots)} != {KEY_BYTES * num_blocks} or len(blocks.is_first) != num_blocks:
        raise PlanError("its columns differ in length")
    return DiskJob(
        copy_id=message.copy_id,
        action=action,
        host_blocks=host_blocks,
        blocks=tuple(
            DiskBlock(slot, blocks.keys[at : at + KEY_BYTES], blocks.roots[at : at + KEY_BYTES], bool(first))
            for slot, at, first in zip(
                slots.tolist(), range(0, len(blocks.keys), KEY_BYTES), blocks.is_first, strict=True
            )
        ),
    )


def _ids(column: bytes) -> Int32Array:
    return from_column(column) if column else NO_IDS


def _rows(column: bytes, what: str, limits: Limits) -> IntArray:
    """Return a column of distinct rows."""
    if not column:
        return NO_ROWS
    narrow = from_column(column)
    _check_rows(narrow, what, limits)
    rows = narrow.astype(np.int64)
    if len(rows) > 1 and len(np.unique(rows)) != len(rows):
        raise PlanError(f"{what}: a row appears twice")
    return rows


def _outside(ids: Int32Array, limit: int) -> bool:
    """Return whether an ID is outside [0, limit). `ids` is not empty. Negative IDs are large as unsigned numbers."""
    return int(ids.view(np.uint32).max()) >= limit


def _check_rows(rows: Int32Array, what: str, limits: Limits) -> None:
    if _outside(rows, limits.max_rows):
        raise PlanError(f"{what}: a row is outside [0, {limits.max_rows})")


def _chunks(message: plan_pb2.Plan, limits: Limits) -> tuple[IntArray, IntArray]:
    if not message.chunk_rows and not message.chunk_lengths:
        return NO_ROWS, NO_ROWS
    lengths = from_columns(message.chunk_rows, message.chunk_lengths)[1].astype(np.int64)
    rows = _rows(message.chunk_rows, "chunk", limits)
    if int(lengths.min()) < 1:
        raise PlanError("chunk: its length is 0 or negative")
    order = np.argsort(rows)
    return rows[order], lengths[order]


def _appends(message: plan_pb2.Plan, limits: Limits) -> tuple[IntArray, Int32Array, Int32Array]:
    windowed = from_column(message.append_windows)
    num_tables = limits.num_kv_groups - 1
    if not (message.append_rows or message.append_blocks or len(windowed)):
        return NO_ROWS, NO_IDS, NO_IDS
    narrow, blocks = from_columns(message.append_rows, message.append_blocks)
    if len(windowed) not in (0, len(narrow) * num_tables):
        raise PlanError(
            f"append: {len(windowed)} blocks for {len(narrow)} positions of {num_tables} tables for windows"
        )
    if not len(narrow):
        return NO_ROWS, NO_IDS, NO_IDS
    _check_rows(narrow, "append", limits)
    _check_blocks(blocks, limits)
    if not len(windowed):
        return narrow.astype(np.int64), blocks, NO_IDS
    windowed = windowed.reshape(-1, num_tables)
    is_new = windowed != -1
    if (is_new != is_new[:, :1]).any():
        raise PlanError("append: a position has new blocks in some tables for windows only")
    if is_new.any():
        _check_blocks(windowed[is_new], limits)
    return narrow.astype(np.int64), blocks, windowed


def _draft_limits(message: plan_pb2.Plan, limits: Limits) -> tuple[IntArray, IntArray]:
    if not message.draft_rows and not message.draft_limits:
        return NO_ROWS, NO_ROWS
    values = from_columns(message.draft_rows, message.draft_limits)[1]
    if _outside(values, limits.max_draft_tokens + 1):
        raise PlanError(f"draft limit: a limit is outside [0, {limits.max_draft_tokens}]")
    return _rows(message.draft_rows, "draft limit", limits), values.astype(np.int64)


def _check_blocks(blocks: Int32Array, limits: Limits) -> None:
    if _outside(blocks, limits.num_blocks):
        raise PlanError(f"block table: a block ID is outside [0, {limits.num_blocks})")


def _swap_out(device: bytes, host: bytes, limits: Limits) -> BlockCopies | None:
    if not (device or host):
        return None
    blocks, host_blocks = from_columns(device, host)
    for what, column, limit in (
        ("block", blocks, limits.num_blocks),
        ("host block", host_blocks, limits.num_host_blocks),
    ):
        if _outside(column, limit):
            raise PlanError(f"swap: a {what} ID is outside [0, {limit})")
    return BlockCopies(blocks, host_blocks)


def _swap_in(message: plan_pb2.Plan, limits: Limits) -> BlockCopies | None:
    """Return the copies from host to device."""
    reverse = _swap_out(message.swap_in_blocks, message.swap_in_host_blocks, limits)
    return None if reverse is None else BlockCopies(reverse.targets, reverse.sources)


def _block_copies(message: plan_pb2.Plan, limits: Limits) -> BlockCopies | None:
    if not (message.copy_sources or message.copy_targets):
        return None
    sources, targets = from_columns(message.copy_sources, message.copy_targets)
    if _outside(sources, limits.num_blocks) or _outside(targets, limits.num_blocks):
        raise PlanError(f"copy: a block ID is outside [0, {limits.num_blocks})")
    if len(np.unique(targets)) < len(targets) or np.isin(targets, sources).any():
        raise PlanError("copy: a target block is also the target or source of another copy")
    return BlockCopies(sources, targets)


def _state_saves(
    message: plan_pb2.Plan, leaves: IntArray, limits: Limits
) -> tuple[StateSaves | None, StateSaves | None]:
    """Return the saves to checkpoints, and those of the rows that leave to host memory."""
    if not (message.save_rows or message.save_lengths or message.save_checkpoints):
        return None, None
    rows, lengths = from_columns(message.save_rows, message.save_lengths)
    checkpoints = from_columns(message.save_rows, message.save_checkpoints)[1]
    _check_rows(rows, "save", limits)
    num_places = limits.num_checkpoints + limits.num_host_states
    if _outside(checkpoints, num_places) or len(np.unique(checkpoints)) < len(checkpoints):
        raise PlanError(f"save: a checkpoint is outside [0, {num_places}), or occurs twice")
    if int(lengths.min()) < 1:
        raise PlanError("save: a state without tokens is saved")
    columns = [each.astype(np.int64) for each in (rows, lengths, checkpoints)]
    on_host = checkpoints >= limits.num_checkpoints
    if not np.isin(rows[on_host], leaves).all():
        raise PlanError("save: the state of a row that does not leave is saved to host memory")
    to_checkpoints, to_host = (
        StateSaves(*(column[part] for column in columns)) if part.any() else None for part in (~on_host, on_host)
    )
    return to_checkpoints, to_host


def _kept_states(message: plan_pb2.Plan, host_saves: StateSaves | None, limits: Limits) -> StateCopies | None:
    """Return the copies of checkpoints to host memory; `host_saves` as from `_state_saves`."""
    if not (message.kept_checkpoints or message.kept_places):
        return None
    checkpoints, places = (
        column.astype(np.int64) for column in from_columns(message.kept_checkpoints, message.kept_places)
    )
    first, end = limits.num_checkpoints, limits.num_checkpoints + limits.num_host_states
    if int(checkpoints.min()) < 0 or int(checkpoints.max()) >= first:
        raise PlanError(f"keep: a checkpoint is outside [0, {first})")
    written = places if host_saves is None else np.concatenate((places, host_saves.checkpoints))
    if int(places.min()) < first or int(places.max()) >= end or len(np.unique(written)) < len(written):
        raise PlanError(f"keep: a place is outside [{first}, {end}), or occurs twice")
    return StateCopies(checkpoints, places)


def _admission(message: plan_pb2.Admission, limits: Limits) -> Admission:
    row = message.row
    if row >= limits.max_rows:
        raise PlanError(f"admission: row {row} is outside [0, {limits.max_rows})")
    tokens = from_column(message.token_ids)
    if not 0 < len(tokens) <= limits.max_model_len:
        raise PlanError(f"admission: the number of tokens, {len(tokens)}, is outside [1, {limits.max_model_len}]")
    if _outside(tokens, limits.vocab_size):
        raise PlanError("admission: a token ID is outside the vocabulary")
    if message.num_prompt_tokens > len(tokens):
        raise PlanError("admission: the prompt is longer than the tokens sent")
    if message.num_computed_tokens >= len(tokens):
        raise PlanError("admission: all tokens are computed already; at least one must remain")
    checkpoint = message.checkpoint if message.HasField("checkpoint") else None
    num_places = limits.num_checkpoints + limits.num_host_states
    if checkpoint is not None and checkpoint >= num_places:
        raise PlanError(f"admission: checkpoint {checkpoint} is outside [0, {num_places})")
    if limits.state_bytes and (checkpoint is None) == (message.num_computed_tokens > 0):
        raise PlanError(
            "admission: recurrent state begins with the first token or with a checkpoint, but"
            f" {message.num_computed_tokens} tokens are computed already, with checkpoint {checkpoint}"
        )
    sampling, fault = _sampling(message.sampling, limits)
    return Admission(
        row=row,
        generation=message.generation,
        token_ids=tokens,
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        block_tables=_block_tables(message, limits),
        window_first=message.window_first,
        window_period=message.window_period,
        checkpoint=checkpoint,
        sampling=sampling,
        sampling_fault=fault,
        request_id=message.request_id,
        traceparent=message.traceparent,
        grammar=decode_grammar(sha256(message.grammar).digest(), message.grammar) if message.grammar else None,
        pooling=_pooling(message, limits),
        prefix_root=message.prefix_root if len(message.prefix_root) == KEY_BYTES else b"",
    )


def _block_tables(message: plan_pb2.Admission, limits: Limits) -> tuple[Int32Array, ...]:
    tables = tuple([from_column(column) for column in message.block_tables])
    if len(tables) != limits.num_kv_groups:
        raise PlanError(f"admission: {len(tables)} block tables do not match {limits.num_kv_groups} KV groups")
    if len(tables[0]) * limits.block_size < message.num_computed_tokens:
        raise PlanError("admission: too few blocks for the computed tokens")
    for blocks in tables:
        if len(blocks):
            _check_blocks(blocks, limits)
    if limits.num_kv_groups > 1:
        _check_windows(message, len(tables[0]), [len(blocks) for blocks in tables[1:]], limits)
    return tables


def _check_windows(message: plan_pb2.Admission, num_blocks: int, lengths: list[int], limits: Limits) -> None:
    """Check that a row's tables for windows hold its window, and that a period holds what a step can reach.

    Args:
        message: the admission.
        num_blocks: blocks of the first group's table.
        lengths: blocks of the other tables.
        limits: the worker's limits.
    """
    first_visible = max(0, message.num_computed_tokens - limits.window + 1) // limits.block_size
    period, reach = message.window_period, limits.window + limits.window_chunk - 1
    if period > limits.max_blocks_per_row + reach or (period - 1) * limits.block_size < reach - 1:
        raise PlanError(f"admission: a window period of {period} blocks does not hold {reach} tokens")
    end = message.window_first + lengths[0]
    if message.window_first > first_visible or len(set(lengths)) > 1:
        raise PlanError("admission: the tables for windows begin behind the window, or differ in length")
    if end > num_blocks or (end < num_blocks and lengths[0] < period):
        raise PlanError(f"admission: the tables for windows end at block {end} of {num_blocks}")


def _pooling(message: plan_pb2.Admission, limits: Limits) -> Pooling:
    mode = int(message.pooling)
    if not mode:
        return Pooling.NONE
    if mode not in (Pooling.LAST, Pooling.MEAN) or not limits.hidden_size or message.grammar:
        raise PlanError(f"admission: pooling mode {mode} is unknown, has a grammar, or the model has no hidden states")
    if mode == Pooling.MEAN and message.num_computed_tokens:
        raise PlanError("admission: mean pooling needs all tokens, but some are computed already")
    return Pooling(mode)


def decode_grammar(key: bytes, serialized: bytes) -> Grammar:
    """Decode a grammar. For a malformed grammar, return only the key, so that its compilation fails."""
    try:
        message = plan_pb2.Grammar.FromString(serialized)
    except DecodeError:
        message = plan_pb2.Grammar()
    match message.WhichOneof("kind"):
        case "json_schema":
            return Grammar(key, "json_schema", message.json_schema, message.costly)
        case "regex":
            return Grammar(key, "regex", message.regex, message.costly)
        case "lark":
            return Grammar(key, "lark", message.lark, message.costly)
    return Grammar(key, "", "", costly=False)


def _sampling(serialized: bytes, limits: Limits) -> tuple[SamplingParams, str]:
    """Return the sampling parameters; if they are invalid, return defaults and the reason.

    The scheduler does not decode these fields, so an error comes from the front end and affects only this row.
    """
    try:
        return decode_sampling(plan_pb2.SamplingParams.FromString(serialized), limits), ""
    except (DecodeError, MalformedColumnError, PlanError) as error:
        return decode_sampling(plan_pb2.SamplingParams(), limits), f"invalid sampling parameters: {error}"


def decode_sampling(params: plan_pb2.SamplingParams, limits: Limits) -> SamplingParams:
    """Decode sampling parameters and check them.

    Raises:
        PlanError: a parameter is invalid.
    """
    temperature, top_k, top_p, min_p = params.temperature, params.top_k, params.top_p, params.min_p
    typical_p, choice, seed = params.typical_p, params.choice, params.seed
    if not (math.isfinite(temperature) and temperature >= 0):
        raise PlanError("admission: temperature is negative or not finite")
    if not (0 <= top_p <= 1 and 0 <= min_p <= 1 and 0 <= typical_p <= 1) or max(top_k, choice) > _INT32_MAX:
        raise PlanError("admission: top_p, min_p, typical_p, top_k or choice is out of range")
    logprobs = params.logprobs if params.HasField("logprobs") else NO_LOGPROBS
    prompt_logprobs = params.prompt_logprobs if params.HasField("prompt_logprobs") else NO_LOGPROBS
    if max(logprobs, prompt_logprobs) > MAX_LOGPROBS:
        raise PlanError(f"admission: more than {MAX_LOGPROBS} log-probabilities per token")
    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p or 1.0,
        seed=seed - (1 << 64) if seed >> 63 else seed,
        choice=choice,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=_ids(params.stop_token_ids),
        rules=_rules(params, limits) if _has_rules(params) else None,
    )


def _has_rules(params: plan_pb2.SamplingParams) -> bool:
    return bool(
        params.repetition_penalty not in (0, 1)
        or params.presence_penalty
        or params.frequency_penalty
        or params.bias_token_ids
        or params.allowed_token_ids
        or params.banned_token_ids
        or params.bad_words
        or (params.min_tokens and params.stop_token_ids)
    )


def _rules(params: plan_pb2.SamplingParams, limits: Limits) -> Rules:
    ids, values = from_columns(params.bias_token_ids, params.bias_values)
    bias = values.view(np.float32)
    allowed, banned = _ids(params.allowed_token_ids), _ids(params.banned_token_ids)
    stops = _ids(params.stop_token_ids) if params.min_tokens else NO_IDS
    words = [from_column(word) for word in params.bad_words]
    numbers = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if not (all(map(math.isfinite, numbers)) and params.repetition_penalty >= 0 and not np.isnan(bias).any()):
        raise PlanError("admission: a penalty is not finite, a bias is NaN, or the repetition penalty is negative")
    for column in (ids, allowed, banned, stops, *words):
        if len(column) and _outside(column, limits.vocab_size):
            raise PlanError("admission: sampling has a token ID outside the vocabulary")
    if any(len(word) < 2 for word in words):
        raise PlanError("admission: a bad word has fewer than two tokens")
    return Rules(
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias_token_ids=ids,
        bias_values=bias,
        allowed_token_ids=allowed,
        banned_token_ids=banned,
        bad_words=tuple([tuple(word.tolist()) for word in words]),
        min_tokens=params.min_tokens,
    )
