"""The content of an admission: the tokens, the worker, and the cached prefix."""

import numpy as np

from checks.sim.coverage import Limit
from checks.sim.promises.base import Promise
from checks.sim.sites import Epoch
from checks.sim.stream import Stream
from records.rules.oracle import grammar_key
from records.rules.violation import ViolationError
from scheduler_svc.core.interface.plan import Plan, RowAdmission


class AdmissionsAreSound(Promise):
    """A live request is admitted with all its tokens, on a worker that is open for requests and has its grammar.

    The worker has room for the request's full length, or has the longest context.
    """

    def admitted(self, stream: Stream, admission: RowAdmission, plan: Plan, epoch: Epoch) -> None:
        row, demand = epoch.model.rows[admission.row], stream.demand
        if epoch.draining and stream.home is not epoch:
            raise ViolationError("worker.draining", f"an admission to {epoch.worker_id}", stream.name)
        if not stream.may_run_on(epoch.model.fingerprint):
            raise ViolationError("worker.model", f"{epoch.worker_id} serves {epoch.model.fingerprint!r}", stream.name)
        self._check_length(stream, epoch)
        if demand.grammar and grammar_key(demand.grammar) not in epoch.compiled:
            raise ViolationError("grammar.compiled", f"{epoch.worker_id} has not compiled its grammar", stream.name)
        if admission.spec.grammar != demand.grammar:
            raise ViolationError("plan.admission", f"grammar {admission.spec.grammar!r}", stream.name)
        known = [*demand.prompt, *stream.tokens]
        if row.tokens[: len(known)] != known or len(row.tokens) > len(known) + 1:
            raise ViolationError("plan.admission", f"{len(row.tokens)} tokens, {len(known)} are known", stream.name)
        if stream.num_known + 1 >= epoch.context:
            self.seen(Limit.CONTEXT)

    def _check_length(self, stream: Stream, epoch: Epoch) -> None:
        whole = len(stream.demand.prompt) + stream.demand.max_tokens
        able = [each for each in self.cluster.usable if stream.may_run_on(each.model.fingerprint)]
        longest = max((each.context for each in able), default=0)
        if not epoch.draining and epoch.context < min(whole, longest):
            what = f"{epoch.worker_id} holds {epoch.context} of {whole} tokens, another worker {longest}"
            raise ViolationError("worker.context", what, stream.name)


class RowsLeave(Promise):
    """After a request has ended, or has left its worker, no later plan contains it under that row generation."""

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        rows = epoch.model.rows
        for row, generation, name in epoch.must_leave:
            present = rows.get(row)
            if present is not None and present.generation == generation and present.name == name:
                raise ViolationError("plan.after_end", f"row {row} is planned although its request left", name)
        epoch.must_leave.clear()


class PrefixesAreShared(Promise):
    """Cached tokens are used as the configuration says, and only those computed under the same salt."""

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        scenario = self.world.scenario
        has_boundaries = scenario.state_bytes or scenario.windows.num_groups > 1
        copies = scenario.shares_prefixes and not has_boundaries and self.config.prefix_cache == "radix"
        if len(plan.copy_sources) and not copies:
            raise ViolationError("prefix.copy", f"blocks are copied under {self.config.prefix_cache}")
        if len(plan.kept_checkpoints):
            self.seen(Limit.STATE_KEPT)
            if np.isin(plan.kept_checkpoints, plan.save_checkpoints).any():
                self.seen(Limit.REPLACED_STATE_KEPT)

    def admitted(self, stream: Stream, admission: RowAdmission, plan: Plan, epoch: Epoch) -> None:
        num_cached, row = admission.num_computed_tokens, epoch.model.rows[admission.row]
        scenario = self.world.scenario
        if not num_cached:
            return
        if stream.demand.scored and not plan.swap_ins:
            raise ViolationError("prefix.whole", f"{num_cached} cached tokens", stream.name)
        self.seen(Limit.SHARED)
        if not scenario.shares_prefixes and not plan.swap_ins:
            raise ViolationError("prefix.off", f"{num_cached} cached tokens", stream.name)
        if admission.checkpoint is not None:
            self.seen(Limit.RESTORED)
            # A swapped request continues at its newest token, which is usually not at a block boundary.
            if admission.checkpoint >= scenario.num_checkpoints and not num_cached % epoch.model.block_size:
                self.seen(Limit.STATE_FOUND_ON_HOST)
        # A copy may span a whole block, because a request that was waiting during a model change has keys of the
        # previous model.
        num_blocks = -(-num_cached // epoch.model.block_size)
        copied = [block for block in row.blocks[:num_blocks] if block in plan.copy_targets]
        shared = [block for block in row.blocks[: num_cached // epoch.model.block_size] if block not in copied]
        self._check_salt(stream, shared, epoch)
        if copied:
            self.seen(Limit.COPIED)
            self._check_salt(stream, plan.copy_sources[np.isin(plan.copy_targets, copied)].tolist(), epoch)

    def _check_salt(self, stream: Stream, blocks: list[int], epoch: Epoch) -> None:
        for block in blocks:
            name = epoch.model.writer(block)
            writer = self.clients.find(name) if name is not None else None
            if writer is not None and writer.demand.salt != stream.demand.salt:
                raise ViolationError("prefix.salt", f"block {block} is {writer.name}'s", stream.name)
