"""A worker and a reader as the protocol defines them, strict about every rule, with arithmetic instead of a model.

The token after a sequence is a function of the whole sequence, so a row that was given wrong tokens, a wrong table or a
wrong length answers with other tokens than `expected_output`. KV is modelled too: each slot of each block remembers the
token and position written to it, and a step reads back its row's whole context through the block table; a block handed
out too early shows as a mismatch.
"""

from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core import events as ev
from scheduler_svc.core.plan import Plan

VOCAB = 1000


def next_token(tokens: list[int]) -> int:
    """The model: depends on every token and its position."""
    value = 17
    for position, token in enumerate(tokens):
        value = (value * 31 + token * (position + 1) + 7) % 1_000_003
    return value % VOCAB


def expected_output(prompt: list[int], max_tokens: int, stops: set[int]) -> list[int]:
    """What a request must deliver."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


@dataclass(slots=True)
class _Row:
    tokens: list[int]
    blocks: list[int]
    computed: int
    decoding: bool = False
    held: bool = False


@dataclass(slots=True)
class ModelWorker:
    """Executes plans; every violated rule of plan.proto is an assertion."""

    peer: bytes
    num_blocks: int
    block_size: int
    max_rows: int
    max_tokens_per_step: int = 64
    epoch: int = 0
    last_step: int = 0
    rows: dict[int, _Row] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)
    num_host_blocks: int = 0
    host: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    kv: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def hello(self, worker_id: str = "w") -> ev.WorkerHello:
        """What the worker says first."""
        return ev.WorkerHello(
            worker=self.peer,
            worker_id=worker_id,
            model=ev.ModelFacts(
                name="m",
                architecture="Model",
                fingerprint="f",
                max_model_len=4096,
                vocab_size=VOCAB,
                dtype="float32",
                eos_token_ids=(),
            ),
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_rows=self.max_rows,
            max_tokens_per_step=self.max_tokens_per_step,
            num_host_blocks=self.num_host_blocks,
        )

    def execute(self, plan: Plan) -> ev.StepDone:
        """One step, in the order that the protocol prescribes."""
        assert plan.epoch == self.epoch
        assert plan.step == self.last_step + 1, "a gap in steps"
        self.last_step = plan.step
        for row in plan.leaves.tolist():
            del self.rows[row]
        for copy in plan.swap_outs:
            self._copy(self.kv, copy.sources.tolist(), self.host, copy.targets.tolist())
        for admission in plan.admissions:
            assert admission.row not in self.rows, "admission to an occupied row"
            assert 0 <= admission.row < self.max_rows
            assert admission.generation > self.generations.get(admission.row, 0)
            self.generations[admission.row] = admission.generation
            self.rows[admission.row] = _Row(
                admission.token_ids.tolist(), admission.blocks.tolist(), computed=admission.num_computed_tokens
            )
        for row, block in zip(plan.append_rows.tolist(), plan.append_blocks.tolist(), strict=True):
            self.rows[row].blocks.append(block)
        for row in plan.holds.tolist():
            assert not self.rows[row].held
            self.rows[row].held = True
        for row in plan.releases.tolist():
            assert self.rows[row].held
            self.rows[row].held = False
        for copy in plan.swap_ins:
            self._copy(self.host, copy.sources.tolist(), self.kv, copy.targets.tolist())
        return self._forward(plan)

    def _copy(
        self,
        source: dict[tuple[int, int], tuple[int, int]],
        source_blocks: list[int],
        target: dict[tuple[int, int], tuple[int, int]],
        target_blocks: list[int],
    ) -> None:
        assert len(source_blocks) == len(target_blocks) == len(set(target_blocks))
        for old, new in zip(source_blocks, target_blocks, strict=True):
            for offset in range(self.block_size):
                if (old, offset) in source:
                    target[new, offset] = source[old, offset]

    def _forward(self, plan: Plan) -> ev.StepDone:
        decodes = [index for index, row in self.rows.items() if row.decoding and not row.held]
        chunks = dict(zip(plan.chunk_rows.tolist(), plan.chunk_lengths.tolist(), strict=True))
        assert len(decodes) == plan.num_decodes, (decodes, plan)
        assert len(decodes) + sum(chunks.values()) == plan.num_tokens <= self.max_tokens_per_step
        assert not any(self.rows[index].decoding for index in chunks)
        work = [(index, 1) for index in decodes] + list(chunks.items())
        # As in every layer of a real model: all KV of the batch is written before anything is read.
        for index, count in work:
            row = self.rows[index]
            assert count > 0
            assert row.computed + count <= len(row.tokens)
            for position in range(row.computed, row.computed + count):
                self.kv[self._slot(row, position)] = (row.tokens[position], position)
            row.computed += count
        sampled: list[tuple[int, int]] = []
        for index, _ in work:
            row = self.rows[index]
            for position in range(row.computed):
                assert self.kv.get(self._slot(row, position)) == (row.tokens[position], position), "KV overwritten"
            if row.computed == len(row.tokens):
                token = next_token(row.tokens)
                row.tokens.append(token)
                row.decoding = True
                sampled.append((index, token))
        sampled.sort()
        return ev.StepDone(
            worker=self.peer,
            epoch=self.epoch,
            step=plan.step,
            rows=np.array([index for index, _ in sampled], np.int32),
            tokens=np.array([token for _, token in sampled], np.int32),
            completed_copies=[copy.copy_id for copy in plan.swap_outs + plan.swap_ins],
        )

    def _slot(self, row: _Row, position: int) -> tuple[int, int]:
        assert position < len(row.blocks) * self.block_size, "a token beyond the row's blocks"
        block = row.blocks[position // self.block_size]
        assert 0 <= block < self.num_blocks
        return block, position % self.block_size
