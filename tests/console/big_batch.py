"""A front end whose core streams artificial steps with many rows, for the page's speed and looks."""

import asyncio
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2 as admin
from tests.services.stack import Stack, running_stack

STEPS_PER_S = 50
PARTS_PER_S = 5
NUM_BLOCKS = 16384
TRACES = "https://traces.example/trace/"
_TENANTS = ("search", "chat", "batch", "mail")


class _Batch:
    """Rows that requests join and leave."""

    def __init__(self, num_rows: int) -> None:
        self._random = random.Random(1)
        self._left = [0] * num_rows
        self._requests = [0] * num_rows
        self._number = self._step = 0

    def part(self) -> admin.WatchStepsResponse:
        """The steps of one part, with the load every second and the tables twice per second."""
        part = admin.WatchStepsResponse()
        for _ in range(STEPS_PER_S // PARTS_PER_S):
            self._add_step(part)
        number = self._step * PARTS_PER_S // STEPS_PER_S
        if number % PARTS_PER_S == 0:
            self._add_load(part)
        if number % 2 == 0:
            self._add_tables(part.tables)
        if number % 40 == 39:
            incident = part.incidents.add(kind=admin.Incident.KIND_PREEMPTED, request_id=f"request-{self._number}")
            incident.time.FromNanoseconds(time.time_ns())
        return part

    def _add_step(self, part: admin.WatchStepsResponse) -> None:
        self._step += 1
        step = part.steps.add(worker_id="worker-0", step=self._step)
        step.start.FromNanoseconds(time.time_ns())
        step.duration.FromMilliseconds(1000 // STEPS_PER_S)
        draw = self._random.random
        for row, left in enumerate(self._left):
            if left == 0:
                if draw() < 0.2:
                    self._number += 1
                    self._requests[row], self._left[row] = self._number, 30 + int(400 * draw() ** 2)
                    step.prefill_rows.append(row)
                    step.prefill_requests.append(self._number)
                    step.prefill_tokens.append(1 + int(200 * draw()))
                    self._name(part, row)
                continue
            self._left[row] -= 1
            if row % 41 == 7 and left % 60 < 15:
                step.waiting_rows.append(row)
                step.waiting_requests.append(self._requests[row])
            else:
                step.decode_rows.append(row)
                step.decode_requests.append(self._requests[row])

    def _name(self, part: admin.WatchStepsResponse, row: int) -> None:
        number = self._requests[row]
        part.requests.add(
            number=number,
            request_id=f"request-{number}",
            tenant=_TENANTS[number % len(_TENANTS)],
            prompt_tokens=100,
            max_tokens=430,
            trace_id=f"{number:032x}",
        )

    def _add_load(self, part: admin.WatchStepsResponse) -> None:
        rows = len(self._left)
        running = sum(map(bool, self._left))
        load, draw = part.load, self._random.random
        load.time.FromNanoseconds(time.time_ns())
        load.running_requests, load.waiting_requests = running, 40
        load.waiting_by_reason.update({"room": 30, "tenant_limit": 10})
        for at, tenant in enumerate(_TENANTS):
            load.waiting_by_tenant.add(tenant=tenant, waiting_requests=16 - 4 * at)
        load.workers.add(
            worker_id="worker-0",
            device="cuda:0 made-up",
            pid=1,
            running_requests=running,
            rows=rows,
            free_blocks=NUM_BLOCKS // 8,
            cached_blocks=NUM_BLOCKS // 4,
            total_blocks=NUM_BLOCKS,
            last_step_tokens=running,
        )
        rates = load.rates
        rates.seconds, rates.completed_requests, rates.good_requests = 1.0, int(20 + 9 * draw()), int(12 + 8 * draw())
        rates.output_tokens, rates.prompt_tokens = running * STEPS_PER_S, int(2000 + 900 * draw())
        rates.cached_prompt_tokens = int(900 * draw())
        rates.ttft.count, rates.ttft.p50, rates.ttft.p99 = 20, 0.1 + 0.1 * draw(), 0.4 + 0.3 * draw()
        rates.itl.count, rates.itl.p50, rates.itl.p99 = 900, 0.02, 0.03 + 0.01 * draw()

    def _add_tables(self, tables: admin.SchedulerTables) -> None:
        tables.time.FromNanoseconds(time.time_ns())
        tables.policy = "fair"
        blocks = tables.block_maps.add(worker_id="worker-0", block_size=16)
        owners = [number for number, left in zip(self._requests, self._left, strict=True) if left]
        blocks.owners.extend(owners)
        blocks.device.total, blocks.device.stride = NUM_BLOCKS, 1
        at, draw = 0, self._random.random
        while at < NUM_BLOCKS:
            length = min(1 + int(12 * draw()), NUM_BLOCKS - at)
            kind = draw()
            state = 0 if kind < 0.12 else 1 if kind < 0.37 else 2 if kind < 0.4 else 3
            if state == 3 and owners:
                state += 2 * int(len(owners) * draw()) + (draw() < 0.1)
            blocks.device.lengths.append(length)
            blocks.device.states.append(state)
            at += length
        blocks.host.total, blocks.host.stride = 512, 1
        blocks.host.lengths.extend((200, 312))
        blocks.host.states.extend((3 + 2 * min(3, len(owners)), 0))
        for reason, length in (("room", 30), ("tenant_limit", 10)):
            queue = tables.queues.add(reason=reason, length=length)
            for place in range(length):
                queue.first.add(
                    number=(1 << 40) + place,
                    request_id=f"waiting-{place}",
                    tenant=_TENANTS[place % len(_TENANTS)],
                    tokens=100 + place,
                    waited_seconds=0.2 * place,
                    waits_for="its turn",
                )


async def _stream(stack: Stack, batch: _Batch, ended: threading.Event) -> None:
    due = time.monotonic()
    while not ended.is_set():
        numbers = [request.number for message in stack.core.messages for request in message.operator_requests]
        if numbers:
            part = batch.part()
            view = link_pb2.View(number=numbers[-1], response=part.SerializeToString(), steps=len(part.steps))
            message = link_pb2.CoreMessage(incarnation=stack.core.incarnation, views=[view])
            stack.core.say(message.SerializeToString())
        due = max(due + 1 / PARTS_PER_S, time.monotonic())
        await asyncio.sleep(due - time.monotonic())


@contextmanager
def big_batch(num_rows: int) -> Iterator[str]:
    """HOST:PORT of a front end whose core streams 50 steps/s of this many rows to the newest viewer."""
    ended, address, ready = threading.Event(), "", threading.Event()

    async def main() -> None:
        nonlocal address
        with tempfile.TemporaryDirectory() as folder:
            async with running_stack(Path(folder), console_trace_url=TRACES + "{trace_id}") as stack:
                address = f"127.0.0.1:{stack.http.base_url.port}"
                ready.set()
                await _stream(stack, _Batch(num_rows), ended)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    try:
        assert ready.wait(60), "the front end has not started"
        yield address
    finally:
        ended.set()
        thread.join(60)
