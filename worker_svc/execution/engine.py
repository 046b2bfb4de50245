"""Engine: executes a plan and returns its result, without a socket.

`launch` applies a plan and starts its step. `collect` waits for the oldest step and returns its result. On an
asynchronous device several steps can be launched before the first is collected; they run in order. If a step has
drafts, the next launch waits for the step's tokens, because the next positions depend on the number of accepted drafts.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from opentelemetry.trace import Span, Tracer

from kernels.block_copy import BlockPool
from shared.logging import get_logger
from worker_svc.device.accelerator import Accelerator
from worker_svc.device.state import DeviceState
from worker_svc.execution.batch import BatchBuilder, StepBatch, Verification
from worker_svc.execution.decode_graphs import DecodeGraphs, DecodeLanes
from worker_svc.execution.executor import (
    Computed,
    DeviceTimes,
    DoneStep,
    Sampled,
    StepInFlight,
    StepOutput,
    make_executor,
)
from worker_svc.execution.sampler import NOT_FINITE, NOT_REACHED, NOTHING_ALLOWED, Sampler
from worker_svc.execution.split_logits import SplitLogits
from worker_svc.execution.tracing import Tracing
from worker_svc.interface.arrays import NO_IDS, NO_ROWS, Int32Array, IntArray
from worker_svc.interface.errors import PlanError
from worker_svc.interface.limits import Limits
from worker_svc.interface.plan import Plan, StateSaves
from worker_svc.interface.result import FailureKind, RowFailure, StepResult, StepTimings
from worker_svc.memory.block_copies import make_copies
from worker_svc.memory.disk_tier import HostBytes
from worker_svc.memory.kv_groups import KVGroups
from worker_svc.memory.kv_views import layer_caches
from worker_svc.memory.swap import Copies, HostPool
from worker_svc.model.base import KVCache, Model
from worker_svc.model.recurrent import RowStates, StateSave
from worker_svc.model.step_graphs import Shape, StepGraphs, captured
from worker_svc.outputs import pooling
from worker_svc.outputs.grammars import GrammarStore
from worker_svc.outputs.scores import PromptPart, Wanted, sections
from worker_svc.ranks.capture import capture_together
from worker_svc.ranks.group import Group
from worker_svc.rows.retained import Retained
from worker_svc.rows.table import RowTable
from worker_svc.speculation.drafts import Proposer, propose


@dataclass(slots=True, kw_only=True)
class _Launched:
    """A launched step, with the data for its result. It is not frozen, because this would take 4 µs more per step."""

    step: int
    sample_rows: IntArray
    """The row of each sampled token."""
    generations: IntArray
    """Their generations."""
    verification: Verification | None
    """None: no row has drafts."""
    membership: int
    """`RowTable.membership` after the launch."""
    left_out: tuple[IntArray, IntArray]
    """Failed rows that the plan includes but that were not computed, with their generations."""
    num_tokens: int
    received_unix_ns: int
    prepare_ns: int
    spans: tuple[Span, ...]
    in_flight: StepInFlight
    copies: tuple[Copies, ...]
    copy_ids: Int32Array
    scored: Wanted | None
    """Rows that need log-probabilities of their sampled tokens."""
    prompt_parts: tuple[PromptPart, ...]
    pooled_parts: tuple[pooling.PooledPart, ...]
    taken: Int32Array | None = None
    """The sampled tokens as returned by `Engine._take_tokens`; None if the row table does not have them."""


class Engine:
    """Executor of plans with one model and one KV cache."""

    def __init__(
        self,
        model: Model,
        caches: Sequence[KVCache],
        limits: Limits,
        device: torch.device,
        tracer: Tracer,
        *,
        accelerator: Accelerator | None = None,
        decode_sizes: Sequence[int] = (),
        step_shapes: Sequence[Shape] = (),
        grammars: GrammarStore | None = None,
        make_proposer: Callable[[RowTable, Sequence[KVCache]], Proposer] | None = None,
        group: Group | None = None,
        worker_id: str = "",
        kv_groups: KVGroups | None = None,
    ) -> None:
        """Create an engine, and capture its graphs.

        Args:
            model: the decoder.
            caches: KV blocks for `model`, as a pair of tensors per layer, or per place of `kv_groups`. Those for a
                draft model follow.
            limits: the worker's limits.
            device: the device of `model` and `caches`.
            tracer: creates the spans of steps and rows.
            accelerator: the accelerator for `device`; None on a CPU.
            grammars: the compiled grammars; None if grammars are not supported.
            decode_sizes: row counts for which decode steps are captured, ascending; none without an accelerator.
            step_shapes: shapes of the graphs for steps with chunks or drafts; none without an accelerator.
            make_proposer: creates the source of drafts from the rows and the draft model's `caches`, whose blocks are
                copied and swapped like those of `model`; None if the worker does not speculate.
            group: the ranks that share the model; None if this process has the whole model.
            worker_id: name of the worker in spans.
            kv_groups: the groups of layers, which share the `caches`; None with one group.
        """
        self._accelerator = accelerator
        state = None
        if accelerator is not None:
            lane_words = DecodeLanes.state_words(decode_sizes) if decode_sizes else 0
            state = DeviceState(accelerator, RowTable.state_words(limits) + lane_words)
        self._model = model
        self._caches = (
            caches[: len(model.kv_shapes)] if kv_groups is None else layer_caches(caches, model.kv_shapes, kv_groups)
        )
        self._pool = BlockPool([tensor for pair in caches for tensor in pair], device)
        self._host_pool = HostPool(caches, limits.num_host_blocks, accelerator)
        self._device = device
        follows = group is not None and group.rank > 0
        self._rows = RowTable(limits, device, state, grammars, follows=follows)
        self.grammars = grammars
        """The compiled grammars; None if grammars are not supported."""
        self._decode_graphs: DecodeGraphs | None = None
        self._step_graphs: StepGraphs | None = None
        lanes = None
        if accelerator is not None and state is not None and decode_sizes:
            ranks = group or Group()
            capture = capture_together(ranks, accelerator.capture)
            lanes = DecodeLanes(self._rows, state, decode_sizes)
            decode_graphs = DecodeGraphs(capture, lanes, model, self._caches, ranks)
            if captured("decode steps", decode_graphs.capture):
                self._decode_graphs = decode_graphs
                if step_shapes:
                    step_graphs = StepGraphs(capture, device, limits, model, self._caches, step_shapes)
                    if captured("steps with chunks or drafts", step_graphs.capture):
                        self._step_graphs = step_graphs
            else:
                lanes = None
        self._proposer = None if make_proposer is None else make_proposer(self._rows, caches[len(model.kv_shapes) :])
        self._batches = BatchBuilder(self._rows, device, lanes, kv_groups)
        split = SplitLogits(group, limits.vocab_size) if group is not None and group.size > 1 else None
        self._sampler = Sampler(self._rows, device, accelerator, split)
        self._executor = make_executor(accelerator)
        self._tracing = Tracing(tracer, limits.max_rows, worker_id)
        self._launched: deque[_Launched] = deque()
        self._failures: dict[int, RowFailure] = {}
        """For each row, its last failure in this epoch."""

    @property
    def limits(self) -> Limits:
        """The worker's limits."""
        return self._rows.limits

    def host_bytes(self) -> HostBytes:
        """Return a view of the host blocks' bytes, for copies to and from disk."""
        return self._host_pool.host_bytes()

    @property
    def num_in_flight(self) -> int:
        """Number of steps that are launched and not collected."""
        return len(self._launched)

    @property
    def oldest_step(self) -> int:
        """Number of the step that `collect` returns next; 0 if no step is in flight."""
        return self._launched[0].step if self._launched else 0

    @property
    def max_in_flight(self) -> int:
        """Number of steps to launch before the oldest is collected."""
        return 2 if self._executor.asynchronous else 1

    def propose_with(self, proposer: Proposer) -> None:
        """Replace the source of drafts, for a measurement; the worker must speculate."""
        self._proposer = proposer

    @torch.inference_mode()
    def launch(self, plan: Plan, received_unix_ns: int) -> None:
        """Apply a plan and start its step.

        Args:
            plan: the next plan of the epoch.
            received_unix_ns: time at which the plan was read from the socket.

        Raises:
            PlanError: the plan does not fit the rows' state; call `reset` next.
        """
        began, began_unix_ns = time.perf_counter_ns(), time.time_ns()
        if self._proposer is not None:
            self._settle(plan)
            self._proposer.follow(plan)
        if self._model.states is not None:
            self._model.states.save_due(self._rows.num_computed)
        left = self._rows.leave(plan)
        self._tracing.rows_left(left, self._rows.num_computed, began_unix_ns)
        swapped_out = self._host_pool.swap_out(plan)
        swapped_out += (self._copy_to_host(plan),)
        if self._model.states is not None:
            for row in left.tolist():
                self._model.states.leave(row)
        if plan.block_copies is not None:
            make_copies(plan.block_copies, self._pool)
        self._rows.change(plan)
        swapped_in = self._host_pool.swap_in(plan)
        swapped_in += (self._restore_states(plan),)
        saves = self._save_states(plan)
        self._tracing.rows_admitted(plan, began_unix_ns)
        failed_rows = self._rows.failed_rows()
        drafts = None
        if self._proposer is not None and self._rows.speculates:
            states = self._model.states
            late, ends = ({}, {}) if states is None else (states.missing, states.draft_ends)
            drafts = propose(self._rows, self._proposer, int(plan.chunk_lengths.sum()), late, ends)
        batch = self._batches.build(plan.chunk_rows, plan.chunk_lengths, drafts, saves)
        if self._proposer is not None and len(plan.chunk_rows):
            self._proposer.prefill(plan.chunk_rows, plan.chunk_lengths)
        prepare_ns = time.perf_counter_ns() - began
        in_flight = self._submit(batch)
        sample_rows = NO_ROWS if batch is None else batch.sample_rows
        self._launched.append(
            _Launched(
                step=plan.step,
                sample_rows=sample_rows,
                generations=self._rows.generation[sample_rows],
                verification=None if batch is None else batch.verification,
                membership=self._rows.membership,
                left_out=(failed_rows, self._rows.generation[failed_rows]),
                num_tokens=0 if batch is None else batch.num_tokens,
                received_unix_ns=received_unix_ns,
                prepare_ns=prepare_ns,
                spans=self._tracing.begin_step(plan, batch, began_unix_ns),
                in_flight=in_flight,
                copies=(*swapped_out, *swapped_in),
                copy_ids=plan.copy_ids,
                scored=None if batch is None else self._sampler.wanted(batch),
                prompt_parts=() if batch is None else batch.prompt_parts,
                pooled_parts=() if batch is None else batch.pooled_parts,
            )
        )

    def ready(self) -> bool:
        """Return whether `collect` would not wait. False if no step is in flight."""
        if not self._launched:
            return False
        oldest = self._launched[0]
        return oldest.in_flight.ready() and all(copies.done() for copies in oldest.copies)

    def collect(self) -> StepResult:
        """Return the result of the oldest step in flight; wait for the device if necessary."""
        launched = self._launched.popleft()
        output, times = launched.in_flight.result()
        tokens = output.tokens if self._proposer is None else self._take_tokens(launched, output.tokens)
        self._tracing.end_step(launched.spans, times.ended_unix_ns)
        rows, generations = launched.sample_rows, launched.generations
        failures: list[RowFailure] = []
        counted: npt.NDArray[np.bool_] = tokens != NOT_REACHED
        # The row may have been launched again before its failure in an earlier step was detected.
        failed = (tokens < 0) & counted
        if self._rows.any_failed:
            failed |= self._rows.has_failed(rows, generations) & counted
        if failed.any():
            places = np.flatnonzero(failed)
            places = places[np.unique(rows[places], return_index=True)[1]]
            failures += self._fail(rows[places], generations[places], tokens[places])
            counted &= ~failed
        scores = None
        if output.scores is not None:
            scores = sections(output.scores, launched.scored, counted, launched.prompt_parts)
        embeddings, not_finite = pooling.completed(output.embeddings, launched.pooled_parts)
        for part in not_finite:
            failures.append(_not_finite(part.row, part.generation, pooling.NOT_FINITE))
            self._log(failures[-1])
        for row, generation in zip(*(column.tolist() for column in launched.left_out), strict=True):
            failures.append(self._failure(row, generation))
        for copies in launched.copies:
            copies.wait()
        self._rows.sampled(rows[counted], generations[counted], tokens[counted])
        kept, counts, draft_counts = rows[counted], None, None
        if launched.verification is not None:
            firsts = launched.verification.firsts
            counts = np.add.reduceat(counted, firsts, dtype=np.int64)
            alive = counts > 0
            kept, counts = rows[firsts][alive], counts[alive]
            draft_counts = launched.verification.num_drafts[alive]
        return StepResult(
            step=launched.step,
            rows=kept,
            tokens=tokens[counted],
            counts=counts,
            draft_counts=draft_counts,
            failures=tuple(failures),
            timings=_timings(launched, times),
            completed_copies=launched.copy_ids,
            scores=scores,
            embeddings=embeddings,
        )

    def retained(self) -> tuple[Retained, ...]:
        """Wait for the device, and return the sequences whose KV stays in the blocks after `reset`."""
        if self._accelerator is not None:
            self._accelerator.synchronize()
        return self._rows.retained()

    def reset(self) -> None:
        """Wait for the device, then drop all rows and all steps in flight, for a new epoch."""
        now = time.time_ns()
        if self._accelerator is not None:
            self._accelerator.synchronize()
        while self._launched:
            self._tracing.end_step(self._launched.popleft().spans, now)
        self._tracing.rows_left(self._rows.clear(), self._rows.num_computed, now)
        self._sampler.clear()
        if self._proposer is not None:
            self._proposer.clear()
        if self.grammars is not None:
            self.grammars.forget_reports()
        self._failures.clear()
        if self._model.states is not None:
            self._model.states.clear()

    def _roll_back(self, rows: IntArray, counts: IntArray) -> None:
        """Restore the states of rows whose drafts were rejected.

        Args:
            rows: the rows, with the accepted tokens.
            counts: number of tokens that each row got in the step.
        """
        states = self._model.states
        if states is None:
            return
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            states.roll_back(row, list(self._rows.known_tokens(row)[-count - 1 : -1]))

    def _copy_to_host(self, plan: Plan) -> Copies:
        """Copy states to host memory: those of rows that leave, and those of checkpoints.

        Raises:
            PlanError: a row has another number of computed tokens, and has not failed.
        """
        states, kept = self._model.states, plan.kept_states
        if states is None or (plan.host_saves is None and kept is None):
            return Copies()
        began_ns = time.perf_counter_ns()
        if plan.host_saves is not None:
            self._save_to_host(states, plan.host_saves)
        if kept is not None:
            for checkpoint, place in zip(kept.checkpoints.tolist(), kept.places.tolist(), strict=True):
                states.keep(checkpoint, place)
        num_states = sum(len(each.checkpoints) for each in (plan.host_saves, kept) if each is not None)
        return self._states_copied(num_states, began_ns)

    def _states_copied(self, num_states: int, began_ns: int) -> Copies:
        """Return the copies of so many states between device and host, which are measured on a CPU only."""
        if self._accelerator is not None:
            return Copies()
        elapsed_ns = time.perf_counter_ns() - began_ns
        num_blocks = num_states * self.limits.state_blocks
        return Copies(num_blocks, elapsed_ns=lambda: elapsed_ns, delay_ns=lambda: elapsed_ns)

    def _save_to_host(self, states: RowStates, saves: StateSaves) -> None:
        """Save the states of rows that leave to host memory; see `_copy_to_host`."""
        for row, length, place in zip(*map(np.ndarray.tolist, saves.columns), strict=True):
            num_computed = int(self._rows.num_computed[row])
            if num_computed == length:
                states.save(StateSave(row, length, place))
            elif self._rows.failed_before_leaving(row) and num_computed < length:
                # Its last tokens are not computed. The request does not continue.
                states.forget(place)
            else:
                raise PlanError(f"save: row {row} has {num_computed} computed tokens, not {length}")

    def _restore_states(self, plan: Plan) -> Copies:
        """Restore the states of admitted rows; return the copies from host memory."""
        states, first = self._model.states, self.limits.num_checkpoints
        if states is None:
            return Copies()
        on_host = []
        for admission in plan.admissions:
            if admission.checkpoint is not None:
                restore = partial(states.restore, admission.row, admission.num_computed_tokens, admission.checkpoint)
                if admission.checkpoint >= first:
                    on_host.append(restore)
                else:
                    restore()
        if not on_host:
            return Copies()
        began_ns = time.perf_counter_ns()
        for restore in on_host:
            restore()
        return self._states_copied(len(on_host), began_ns)

    def _save_states(self, plan: Plan) -> tuple[StateSave, ...]:
        """Save present states to checkpoints; return the saves within the step.

        Raises:
            PlanError: a row is beyond the state to save.
        """
        states = self._model.states
        if states is None or plan.state_saves is None:
            return ()
        later, chunk_rows = [], set(plan.chunk_rows.tolist())
        for row, length, checkpoint in zip(*map(np.ndarray.tolist, plan.state_saves.columns), strict=True):
            save = StateSave(row, length, checkpoint)
            if self._rows.num_computed[row] == length:
                # This is also true for a row that has just failed, which the step does not compute.
                states.save(save)
            elif self._rows.num_computed[row] > length:
                raise PlanError(
                    f"save: row {row} has {self._rows.num_computed[row]} computed tokens, more than {length}"
                )
            elif row in chunk_rows:
                later.append(save)
            else:
                states.postpone(save)
        return tuple(later)

    def _settle(self, plan: Plan) -> None:
        """Pass the tokens of the steps in flight to the row table if the next step depends on them.

        This is the case if the next step may have drafts or follows a step with drafts.
        """
        waiting = [launched for launched in self._launched if launched.taken is None]
        if not waiting:
            return
        drafted = any(each.verification is not None for each in waiting)
        if self._rows.speculates or len(plan.draft_rows) or drafted:
            for launched in waiting:
                self._take_tokens(launched, launched.in_flight.tokens())

    def _take_tokens(self, launched: _Launched, tokens: Int32Array) -> Int32Array:
        """Pass the sampled tokens of a step to the row table, once per step and in order.

        Returns: The tokens, with `NOT_REACHED` instead of tokens after rejected drafts.
        """
        if launched.taken is not None:
            return launched.taken
        rows, generations, verification = launched.sample_rows, launched.generations, launched.verification
        if verification is None:
            self._rows.note_last(rows, tokens)
        else:
            firsts = verification.firsts
            counts, tokens = verification.check(tokens, NOT_REACHED)
            rows, last = rows[firsts], tokens[firsts + counts - 1]
            drafts = verification.num_drafts
            if self._rows.membership != launched.membership or int(last.min()) < 0:
                current = (last >= 0) & self._rows.uses(rows, generations[firsts])
                rows, counts, last, drafts = rows[current], counts[current], last[current], drafts[current]
            self._rows.accept(rows, counts, last)
            self._tracing.verified(rows, drafts, counts - 1)
        launched.taken = tokens
        self._rows.take_tokens(launched.sample_rows, generations, tokens)
        if verification is not None:
            rejecting = counts <= drafts
            self._roll_back(rows[rejecting], counts[rejecting])
        return tokens

    def _fail(self, rows: IntArray, generations: IntArray, tokens: Int32Array) -> list[RowFailure]:
        """Exclude rows from all further steps, log each row that has not failed before, and return the failures."""
        known = self._rows.has_failed(rows, generations) | (self._rows.generation[rows] != generations)
        failures = []
        for row, generation, code, is_known in zip(
            rows.tolist(), generations.tolist(), tokens.tolist(), known.tolist(), strict=True
        ):
            failure = self._failure(row, generation, code)
            self._failures[row] = failure
            failures.append(failure)
            if not is_known:
                self._log(failure)
        self._rows.fail(rows, generations)
        return failures

    def _failure(self, row: int, generation: int, code: int = 0) -> RowFailure:
        """Return the failure of a row's current request: an earlier failure, or the failure for `code`."""
        before = self._failures.get(row)
        if before is not None and before.generation == generation:
            return before
        if code == NOT_FINITE:
            return _not_finite(row, generation, "the model's logits are not finite")
        if code == NOTHING_ALLOWED and self._rows.generation[row] == generation:
            return self._rows.explain_no_token(row)
        # Another request now uses the row, so the constraints of the failed request are no longer known.
        kind = FailureKind.NO_TOKEN_ALLOWED if code == NOTHING_ALLOWED else FailureKind.INTERNAL
        return RowFailure(row=row, generation=generation, kind=kind, reason="the row's constraints allow no token")

    def _log(self, failure: RowFailure) -> None:
        # Omit the request ID if another request already uses the row.
        if self._rows.generation[failure.row] == failure.generation:
            request_id = self._rows.request_id(failure.row)
            kind = failure.kind.name.lower()
            get_logger().warning("row failed", request_id=request_id, row=failure.row, kind=kind, reason=failure.reason)

    def _submit(self, batch: StepBatch | None) -> StepInFlight:
        if batch is None:
            return DoneStep(
                StepOutput(NO_IDS),
                DeviceTimes(started_unix_ns=time.time_ns(), forward_ns=0, sample_ns=0, idle_before_ns=0),
            )
        return self._executor.submit(lambda: self._forward(batch), lambda computed: self._sample(computed, batch))

    def _forward(self, batch: StepBatch) -> Computed:
        if batch.bucket and self._decode_graphs is not None:
            return Computed(self._decode_graphs.forward(batch.bucket, len(batch.rows)))
        inputs = (batch.input_ids, batch.positions, batch.attention)
        if self._step_graphs is not None and not batch.prompt_parts and not batch.pooled_parts:
            logits = self._step_graphs.forward(*inputs, batch.logits_index)
            if logits is not None:
                return Computed(logits)
        model = self._model
        if batch.hidden_index is None or batch.logits_index is None:
            return Computed(model.forward(*inputs, self._caches, batch.logits_index))
        return Computed(*model.forward_hidden(*inputs, self._caches, batch.logits_index, batch.hidden_index))

    def _sample(self, computed: Computed, batch: StepBatch) -> Sampled:
        sampled = self._sampler.sample(computed.logits, batch)
        if computed.hidden is None:
            return sampled
        return replace(sampled, embeddings=self._rows.pooling.pool(computed.hidden, batch.pooled_parts))


def _not_finite(row: int, generation: int, reason: str) -> RowFailure:
    return RowFailure(row=row, generation=generation, kind=FailureKind.NOT_FINITE, reason=reason)


def _timings(launched: _Launched, times: DeviceTimes) -> StepTimings:
    """Return the measurements of a step whose copies are complete."""
    overran = (launched.in_flight.ns_until(each.ended) for each in launched.copies if each.ended is not None)
    delay_ns = sum(copies.delay_ns() for copies in launched.copies) + max(overran, default=0)
    return StepTimings(
        received_unix_ns=launched.received_unix_ns,
        started_unix_ns=times.started_unix_ns,
        prepare_ns=launched.prepare_ns,
        forward_ns=times.forward_ns,
        sample_ns=times.sample_ns,
        idle_before_ns=times.idle_before_ns,
        num_tokens=launched.num_tokens,
        copied_blocks=sum(copies.num_blocks for copies in launched.copies),
        copy_ns=sum(copies.elapsed_ns() for copies in launched.copies),
        copy_delay_ns=delay_ns,
    )
