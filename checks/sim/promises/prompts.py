"""How a step's prompt tokens are shared: in policy order, with a part for the shortest prompts."""

from dataclasses import dataclass

from checks.sim.promises.base import Promise, Watched
from checks.sim.promises.blame import Suspects
from checks.sim.promises.eligible import Eligibility
from checks.sim.promises.keys import PolicyKeys
from checks.sim.promises.limits import most_tokens_of
from checks.sim.sites import Epoch
from checks.sim.stream import Stream
from records.rules.model_worker import Row
from records.rules.violation import ViolationError
from scheduler_svc.core.interface.plan import Plan, RowAdmission
from shared.request_spec import Pooling

_HAVE_NO_KEYS = ("fair", "lpm")
_URGENT_ALL_THE_SAME = ("priority", "edf")
"""Policies under which a prompt keeps its share after it has missed its target."""
_EPSILON_S = 1e-6
_MOST_ADMITTED = 32
"""If a plan has more admissions than this, another limit may have stopped the short part."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with tokens to compute when a plan is made."""

    row: Row
    stream: Stream
    rest: int
    """Tokens that were not computed before the plan."""
    length: int
    """Length that decides whether the prompt is short: `rest`, or all tokens if an admission may find cached tokens."""
    is_new: bool
    """Whether the plan admits the prompt."""
    chunk: int
    """Number of its tokens that the plan computes."""
    cost: float
    """Budget tokens that the chunk takes."""


class PromptOrder(Promise):
    """Compares the prompts in one plan. This class guarantees nothing itself."""

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self._keys = PolicyKeys(watched)
        self.has_keys = not self.config.classes and self.config.policy not in _HAVE_NO_KEYS

    def prompts(self, plan: Plan, epoch: Epoch) -> list[Prompt]:
        """Return the prompts in progress whose readers have credit, including those that the plan admits."""
        chunks = dict(zip(plan.chunk_rows.tolist(), plan.chunk_lengths.tolist(), strict=True))
        admitted = {admission.row for admission in plan.admissions}
        found = []
        for row in epoch.model.rows.values():
            chunk = chunks.get(row.index, 0)
            rest = row.num_admitted - row.computed + chunk
            stream = self.clients.live.get(row.name)
            if stream is None or rest <= 0 or (stream.starved and not chunk):
                continue
            is_new = row.index in admitted
            length = row.num_admitted if is_new else rest
            found.append(Prompt(row, stream, rest, length, is_new, chunk, self._cost(row, chunk, epoch)))
        return found

    def is_behind(self, one: Stream, other: Stream) -> bool:
        """Return whether `one` certainly ranks behind `other` under a policy with keys."""
        ahead, behind = self._keys.largest(other), self._keys.smallest(one)
        return ahead < behind or (ahead == behind and self.book.sequence[other] < self.book.sequence[one])

    def is_admitted_later(self, one: Prompt, other: Prompt) -> bool:
        """Return whether `one` certainly gets tokens after `other`, apart from the short part."""
        if self.has_keys:
            return self.is_behind(one.stream, other.stream)
        return one.row.admitted > other.row.admitted

    def keeps_share(
        self, behind: list[Prompt], all_of_them: list[Prompt], epoch: Epoch, budget: float | None = None
    ) -> bool:
        """Return whether the prompts that rank behind another one take no more than the plan's short part.

        Args:
            behind: the prompts that rank behind.
            all_of_them: all prompts of the plan.
            epoch: the worker.
            budget: the maximum budget tokens that the plan's chunks can use; None for those actually used.
        """
        if not self.config.serves_short_first:
            return not any(each.chunk for each in behind)
        if budget is None:
            budget = sum(each.cost for each in all_of_them)
        break_even = epoch.model.break_even_context
        # Costs are rounded up, and the remaining budget may not suffice for another token.
        dearest = max((each.row.num_admitted for each in all_of_them), default=0) / break_even if break_even else 0.0
        # In some steps the short part is rounded up, by three quarters of a token at most.
        share, rounding = (3 / 4, 3 / 4) if self._first_may_be_late(all_of_them) else (1 / 2, 1 / 2)
        tolerance = 1 + len(all_of_them) + dearest if break_even else rounding
        return sum(each.cost for each in behind) <= share * budget + tolerance

    def _first_may_be_late(self, prompts: list[Prompt]) -> bool:
        """Return whether a prompt missed its first-token target although it may be the oldest prompt in progress."""
        if not self.has_keys or self.config.policy in _URGENT_ALL_THE_SAME:
            return False
        started = [each for each in prompts if not each.is_new]
        return any(
            self._is_late(each.stream)
            for each in started
            if not any(self.is_behind(each.stream, other.stream) for other in started)
        )

    def _is_late(self, stream: Stream) -> bool:
        due = stream.ttft_deadline
        if due is None:
            prompt_s = self.config.slo_ttft_token_s * len(stream.demand.prompt)
            due = stream.arrival + self.config.slo_ttft_s + prompt_s
        return self.world.now > due - _EPSILON_S

    def by_short_part(
        self, other: Stream, stream: Stream, plan: Plan, epoch: Epoch, *, num_given_back: int = 0
    ) -> bool:
        """Return whether `stream` may be admitted before the waiting `other` because it is short.

        `num_given_back` is the number of rows that requests lost in this plan, after its admissions.
        """
        if not (self.config.serves_short_first and self.has_keys):
            return False  # `fair` and `lpm` have their own checks.
        prompts = self.prompts(plan, epoch)
        if any(each.stream is other for each in prompts):
            return True  # This same plan admits the request.
        behind = [each for each in prompts if self.is_behind(each.stream, other)]
        if stream.num_known > other.num_known:
            return False
        # If no memory or no row is left, or the first request's prefix is copied to the device, the other half may be
        # unused, or be used by prompts further back.
        budget = most_tokens_of(self, epoch.model) - plan.num_decodes
        has_no_row = len(epoch.model.rows) + num_given_back >= min(self.config.max_num_seqs, epoch.model.max_rows)
        return has_no_row or bool(plan.swap_ins) or self.keeps_share(behind, prompts, epoch, budget)

    def token_cost(self, prompt: Prompt, epoch: Epoch) -> float:
        """Return a lower bound on the budget tokens for the next token of a prompt; 0 if all tokens cost the same."""
        break_even = epoch.model.break_even_context
        return 2 + prompt.row.computed / break_even if break_even else 0.0

    @staticmethod
    def _cost(row: Row, chunk: int, epoch: Epoch) -> float:
        break_even = epoch.model.break_even_context
        return chunk * (1 + (row.computed - chunk) / break_even) if break_even else float(chunk)


class PromptsAreShared(Promise):
    """The first prompts in policy order get at least half of a step's prompt tokens.

    The rest goes to the shortest prompts. Under `fcfs` and in batch modes, all prompt tokens follow the policy order. A
    prompt therefore waits at most twice the time for itself and all prompts before it. If the first started prompt has
    missed its target, the first prompts get at least a quarter, and a prompt waits at most four times as long.
    """

    def __init__(self, watched: Watched, suspects: Suspects) -> None:
        super().__init__(watched)
        self._suspects = suspects
        self._order = PromptOrder(watched)
        self._longest = {self.config.long_prefill_token_threshold}
        """Chunk lengths that a limit may determine."""

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        if not len(plan.chunk_rows) or self._suspects.may_try_alone:
            return  # While a suspect request runs alone, all others wait.
        self._longest = {self.config.long_prefill_token_threshold, epoch.model.longest_window_chunk} - {0}
        order, prompts = self._order, self._order.prompts(plan, epoch)
        # Copies of cached blocks to the device take a part of the budget, for requests at any place in the order.
        budget = most_tokens_of(self, epoch.model) - plan.num_decodes if plan.swap_ins else None
        for prompt in prompts:
            if self._has_all(prompt):
                continue
            if prompt.is_new and len(self.cluster.sites) > 1:
                continue  # Requests that are assigned to the worker are admitted first or last.
            behind = [each for each in prompts if each.chunk and order.is_admitted_later(each, prompt)]
            if not order.keeps_share(behind, prompts, epoch, budget):
                what = f"{prompt.rest - prompt.chunk} tokens of row {prompt.row.index} wait for later prompts"
                raise ViolationError("order.prompts", what, prompt.row.name)
            if prompt.is_new:
                continue  # The prompt may have lacked a row or memory in the short part.
            for each in behind:
                # A remainder too small for one more token of a prompt goes to the next prompt.
                if each.length > prompt.length and each.cost > order.token_cost(prompt, epoch):
                    what = f"row {each.row.index} has {each.length} tokens left and goes before {prompt.length}"
                    raise ViolationError("order.prompts", what, prompt.row.name)

    def _has_all(self, prompt: Prompt) -> bool:
        """Return whether only the budget limits the prompt in this plan."""
        left = prompt.rest - prompt.chunk
        waits_for_room = left == 1 and prompt.row.pooling is not Pooling.NONE
        return not left or prompt.chunk in self._longest or waits_for_room


class ShortPromptsStart(Promise):
    """The shortest prompt is in the next plan if there are rows and memory for it and for the first prompt.

    It may wait for its prefix while a plan copies blocks from the host.
    """

    def __init__(self, watched: Watched, eligibility: Eligibility) -> None:
        super().__init__(watched)
        self._eligibility = eligibility
        self._order = PromptOrder(watched)
        config = self.config
        self._applies = config.serves_short_first and self._order.has_keys and len(self.cluster.sites) == 1
        self._is_calm = False

    def asked(self, epoch: Epoch) -> None:
        self._is_calm = True

    def displaced(self, stream: Stream, epoch: Epoch, outcome: str) -> None:
        self._is_calm = False

    def ended(self, stream: Stream) -> None:
        # When a request is refused, its place in the tenant's quota becomes free with the next plan.
        self._is_calm &= not self._eligibility.has_quota(stream)

    def admitted(self, stream: Stream, admission: RowAdmission, plan: Plan, epoch: Epoch) -> None:
        self._is_calm &= len(plan.admissions) < _MOST_ADMITTED

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        if not (self._applies and self._is_calm and self.book.waiting and len(plan.chunk_rows)) or plan.swap_ins:
            return
        waiting = list(self.book.waiting)
        shortest = min(waiting, key=lambda stream: stream.num_known)
        prompts = self._order.prompts(plan, epoch)
        given = [each for each in prompts if each.chunk]
        others = [other.num_known for other in waiting if other is not shortest]
        if min([each.length for each in prompts] + others) <= shortest.num_known:
            return
        # A one-token step has no two parts, so its token goes to either. The token is computed even if its cost exceeds
        # the budget.
        if sum(each.chunk for each in given) < 2:
            return
        model, memory = epoch.model, self._eligibility.memory(epoch)
        if len(model.rows) + 1 >= min(self.config.max_num_seqs, model.max_rows):
            return
        needed = sum(-(-length // model.block_size) for length in (shortest.num_known, max(others, default=0)))
        needed += 2 * model.max_window_blocks(model.num_blocks)
        # The first request also reserves the memory into which the short one may grow.
        whole = min(len(shortest.demand.prompt) + shortest.demand.max_tokens, epoch.context)
        needed += max(0, (whole - shortest.num_known) // model.block_size + 1)
        if self.config.capacity == "guaranteed_no_evict" or needed + memory.reserve > memory.available:
            return
        if any(self._eligibility.obstacle(each, epoch, memory) is not None for each in waiting):
            return
        what = f"{shortest.num_known} tokens wait, {len(given)} longer prompts get a chunk"
        raise ViolationError("order.short", what, shortest.name)
