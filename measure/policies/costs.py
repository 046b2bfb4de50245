"""Cost model: how long a simulated device takes for a step, and how much its KV cache holds.

The cost is linear in the work of a step. Every scheduler in a run has the same cost model, and none can read it.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from records.replay import ReplayError
from records.whatif.disk import ASSUMED_LATENCY_S
from records.whatif.saved import Service, from_json
from records.whatif.step_times import StepTimesError
from shared.config import ConfigError


class Work(NamedTuple):
    """Work of a step."""

    prefill: int
    """Prompt tokens, including generated tokens that are recomputed."""
    decodes: int
    """Rows that decode one token each."""
    context: int
    """KV tokens that the decode rows read, summed over the rows."""
    prefill_context: int
    """KV tokens that the prompt tokens read, summed over the tokens."""
    copied_out: int = 0
    """Blocks that are copied to the host."""
    copied_in: int = 0
    """Blocks that are copied to the device."""
    awaited: int = 0
    """Copies that the step waits for: of blocks that it writes or reads itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A device with a model; times in seconds."""

    name: str
    constant_s: float
    """Fixed time per step."""
    prefill_s: float
    """Time per prompt token."""
    decode_s: float
    """Time per decode row."""
    context_s: float
    """Time per KV token that a decode row reads."""
    prefill_context_s: float = 0.0
    """Time per pair of a prompt token and a KV token that it reads."""
    block_copy_s: float = 0.0
    """Time per block copied between device and host."""
    copies_overlap: bool = False
    """Whether copies in each direction run concurrently with the step, as on a GPU."""
    kv_tokens: int
    """Tokens that the KV cache holds."""
    host_tokens: int = 0
    """Tokens whose KV fits into host memory."""
    disk_tokens: int = 0
    """Tokens whose KV fits on disk."""
    disk_block_s: float = 0.0
    """Time per block that is read from or written to disk."""
    disk_latency_s: float = 100e-6
    """Time from a disk job's order to its start and from its end to its report."""
    kv_token_bytes: int = 0
    """Bytes of KV per token; 0 if not known. It is needed to state the bandwidth of a disk."""
    max_model_len: int = 131_072
    block_size: int = 16
    max_num_seqs: int = 256
    """Rows of the device."""
    max_num_batched_tokens: int = 8192
    """Token budget per step, unless a scheduler sets its own."""

    @property
    def num_host_blocks(self) -> int:
        """Blocks in host memory."""
        return self.host_tokens // self.block_size

    @property
    def num_disk_blocks(self) -> int:
        """Blocks on disk."""
        return self.disk_tokens // self.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self.kv_tokens // self.block_size

    def seconds(self, work: Work) -> float:
        """Return the time from the beginning of a step to its result; 0 if it computes and copies nothing.

        Copies that overlap begin with the step, in both directions at the same time, and the result waits for them. The
        step itself waits only for copies of blocks that it writes or reads.
        """
        computing_s, copied = self.computing_s(work), work.copied_out + work.copied_in
        if not self.copies_overlap:
            return (computing_s or self.constant_s) + self.block_copy_s * copied if copied else computing_s
        awaited_s = self.block_copy_s * work.awaited
        return max(awaited_s + computing_s, self.block_copy_s * max(work.copied_out, work.copied_in))

    def computing_s(self, work: Work) -> float:
        """Return the time for a step without its copies; 0 if it computes nothing."""
        if not (work.prefill or work.decodes):
            return 0.0
        return (
            self.constant_s
            + self.prefill_s * work.prefill
            + self.decode_s * work.decodes
            + self.context_s * work.context
            + self.prefill_context_s * work.prefill_context
        )


PRESETS = {
    each.name: each
    for each in (
        # Roughly an 8B model in bf16 on one H100: 131,072 bytes of KV per token at 3 TB/s, and at 25 GB/s to the host.
        Costs(
            name="8b-h100",
            constant_s=6e-3,
            prefill_s=25e-6,
            decode_s=10e-6,
            context_s=131_072 / 3e12,
            block_copy_s=16 * 131_072 / 25e9,
            copies_overlap=True,
            disk_block_s=16 * 131_072 / 3e9,
            kv_token_bytes=131_072,
            kv_tokens=409_600,
        ),
        # Roughly a 70B model in bf16 on four H100: 327,680 bytes of KV per token. 148 GB remain after the weights.
        Costs(
            name="70b-4xh100",
            constant_s=14e-3,
            prefill_s=65e-6,
            decode_s=12e-6,
            context_s=27e-9,
            block_copy_s=16 * 327_680 / 100e9,
            copies_overlap=True,
            disk_block_s=16 * 327_680 / 3e9,
            kv_token_bytes=327_680,
            kv_tokens=450_560,
        ),
    )
}
"""Devices by name."""
DEFAULT = "8b-h100"
_MAY_BE_ZERO = ("host_tokens", "disk_tokens", "kv_token_bytes")


def read_costs(name: str) -> Costs:
    """Return a preset by name, or read a JSON file with the fields of `Costs` or with learned step times.

    `quire replay RECORD --learn-step-times FILE` writes step times learned from a service. Only the first worker's
    linear model is used. The variance of the steps is ignored.

    Raises:
        ConfigError: the preset does not exist, or the file is invalid.
    """
    if name in PRESETS:
        return PRESETS[name]
    known = ", ".join(PRESETS)
    try:
        found = json.loads(Path(name).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--costs: {name}: cannot be read ({error}); use a JSON file or one of {known}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--costs: {name}: not a JSON object; use the fields of a device, see docs/arena.md")
    if "step_times" in found:
        try:
            return of_service(Path(name).stem, from_json(json.dumps(found)))
        except (StepTimesError, ReplayError) as error:
            raise ConfigError(f"--costs: {name}: {error}") from None
    types = {field.name: field.type for field in dataclasses.fields(Costs)}
    fields: dict[str, Any] = {"name": Path(name).stem, **found}
    for key, value in fields.items():
        if key not in types:
            raise ConfigError(f"--costs: {name}: unknown field {key!r}; use {', '.join(types)}")
        if types[key] is bool:
            if not isinstance(value, bool):
                raise ConfigError(f"--costs: {name}: {key} is {value!r}; use true or false")
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if key != "name" and not is_number:
            raise ConfigError(f"--costs: {name}: {key} is {value!r}; use a number of at least 0")
        if types[key] is int and value < 1 and key not in _MAY_BE_ZERO:
            raise ConfigError(f"--costs: {name}: {key} is {value!r}; use a whole number of at least 1")
    missing = [each.name for each in dataclasses.fields(Costs) if each.default is dataclasses.MISSING]
    if absent := [key for key in missing if key not in fields]:
        raise ConfigError(f"--costs: {name}: missing: {', '.join(absent)}; add the missing fields")
    if fields["constant_s"] == 0:
        raise ConfigError(f"--costs: {name}: constant_s is 0; use a number above 0")
    values: dict[str, Any] = {key: int(value) if types[key] is int else value for key, value in fields.items()}
    return Costs(**values)


def of_service(name: str, service: Service) -> Costs:
    """Return the device of a service, from the step times that were learned from its record."""
    times, worker = service.times, service.members[0].hello
    return Costs(
        name=name,
        constant_s=times.constant_s,
        prefill_s=times.prefill_s,
        decode_s=times.decode_s,
        context_s=times.context_s,
        prefill_context_s=times.prefill_context_s,
        block_copy_s=times.block_copy_s + times.block_overlap_s,
        copies_overlap=times.block_overlap_s > times.block_copy_s,
        disk_block_s=0.0 if times.disk is None else times.disk.read_s,
        disk_latency_s=ASSUMED_LATENCY_S if times.disk is None else times.disk.latency_s,
        kv_token_bytes=worker.block_bytes // worker.block_size,
        kv_tokens=worker.num_blocks * worker.block_size,
        host_tokens=worker.num_host_blocks * worker.block_size,
        disk_tokens=worker.num_disk_blocks * worker.block_size,
        max_model_len=worker.model.max_model_len,
        block_size=worker.block_size,
        max_num_seqs=worker.max_rows,
        max_num_batched_tokens=worker.max_tokens_per_step,
    )
