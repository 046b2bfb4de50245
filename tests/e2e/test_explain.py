"""`quire explain` with a running service: planted causes of slowness are named first, without knowledge of them.

`QUIRE_SEED=N make test-all ARGS=tests/e2e/test_explain.py` repeats the order and the parameters of a run.
"""

import asyncio
import contextlib
import io
import json
import random
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import Served, Service, serve
from quire import AsyncClient, Client
from quire_server.cli.main import main
from tests.e2e.planted import ADMISSION, CAUSES, MAX_LENGTH, SERVICES, Planted, Scene
from tests.examples import SEED

PATIENCE_S = 120


def _quire(*arguments: str) -> tuple[int, str, str]:
    """Run a `quire` command in this process; return its exit code and its output on stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


def _explain(served: Service, *arguments: str) -> str:
    """Run `quire explain` with the service; return its output."""
    code, out, err = _quire("explain", *arguments, f"--target={served.grpc}")
    assert code == 0, err
    return out


def _explained(served: Service, request_id: str, count: int = 1) -> Any:
    """Return the explanation of a request, once its front end's report is in the record.

    Several choices or prompts of a call have one explanation each.
    """
    end = time.monotonic() + PATIENCE_S
    while True:
        code, out, err = _quire("explain", request_id, "--json", f"--target={served.grpc}")
        found = json.loads(out)["requests"] if code == 0 else []
        is_whole = found and all(not each["live"] and each["link_error_s"] is not None for each in found)
        if (is_whole and len(found) == count) or time.monotonic() > end:
            assert len(found) == count, f"{request_id}: {len(found)} explanations {err}"
            return found[0]


def _plant(served: Served, name: str, planted: Planted, rng: random.Random) -> tuple[str, str]:
    """Plant a cause; return one line about the outcome, and the error in the explanation, if any."""

    async def plant() -> Scene:
        async with AsyncClient(served.grpc) as client:
            scene = Scene(served, client, rng, f"r{rng.getrandbits(48):012x}")
            await planted.plant(scene)
        return scene

    scene = asyncio.run(plant())
    found = _explained(served, scene.victim)
    causes = {each["cause"]: each["seconds"] for each in found["causes"]}
    drawn = ", ".join(f"{what} {value}" for what, value in scene.drawn.items())
    shares = ", ".join(f"{cause} {seconds:.3f} s" for cause, seconds in list(causes.items())[:3])
    line = f"{name} ({drawn}): {found['total_s']:.3f} s: {shares}"
    wrong = []
    if next(iter(causes)) not in planted.names:
        wrong.append(f"first is {next(iter(causes))!r}, not {' or '.join(map(repr, planted.names))}")
    if sum(causes.values()) != pytest.approx(found["total_s"], rel=0.01):
        wrong.append(f"the causes sum to {sum(causes.values()):.4f} s")
    if scene.holders and scene.holders.isdisjoint(found["causes"][0]["requests"]):
        wrong.append(f"it names none of {sorted(scene.holders)[:5]}")
    if not found["would_have_helped"]:
        wrong.append("it does not say what would have helped")
    if not wrong:
        return line, ""
    return line, f"{line}\n{'; '.join(wrong)}\n{_explain(served, scene.victim)}"


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """Starts each service when it is first needed: one worker, a record, and tenants with limits."""
    with contextlib.ExitStack() as stack:
        checkpoint = make_checkpoint(
            "LlamaForCausalLM", tmp_path_factory.mktemp("model"), max_position_embeddings=MAX_LENGTH
        )
        running: dict[str, Served] = {}

        def get(name: str) -> Served:
            if name not in running:
                folder = tmp_path_factory.mktemp("explain")
                admission = folder / "admission.toml"
                admission.write_text(ADMISSION, encoding="utf-8")
                flags = (*SERVICES[name], f"--admission-file={admission}", f"--record-dir={folder / 'record'}")
                running[name] = stack.enter_context(serve(checkpoint, *flags))
            return running[name]

        yield get


def _cases() -> Iterator[Any]:
    """Yield all causes in random order.

    In a daily run, other tests share the machine, which can hide causes that cost CPU time.
    """
    for name in random.Random(SEED).sample(sorted(CAUSES), len(CAUSES)):
        yield pytest.param(name, marks=[pytest.mark.release] if CAUSES[name].shares_cpu else [])


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", list(_cases()))
def test_a_planted_cause_is_named_first(name: str, services: Callable[[str], Served]) -> None:
    """A cause is planted into the running service; `quire explain` names it first.

    The run's seed determines the order of the causes and their parameters.
    """
    planted = CAUSES[name]
    served = services(planted.service)

    line, wrong = _plant(served, name, planted, random.Random(f"{SEED} {name}"))

    print(line)
    assert not wrong, f"QUIRE_SEED={SEED}\n{wrong}"


def _post(served: Service, path: str, body: dict[str, object]) -> tuple[str, str]:
    """Send a request; return the ids in the response body and in the header."""
    request = urllib.request.Request(
        f"http://{served.http}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
        return json.loads(response.read())["id"], response.headers["x-request-id"]


@pytest.mark.every(3)
def test_every_id_that_an_api_hands_out_is_explained(demo: Service) -> None:
    """The id in each API's response, the header, and the id of each prompt and choice all identify the request."""
    chat = [{"role": "user", "content": "hello"}]
    ids = [
        *_post(demo, "/v1/chat/completions", {"messages": chat, "max_tokens": 2, "n": 2}),
        *_post(demo, "/v1/completions", {"prompt": "a fox", "max_tokens": 2}),
        *_post(demo, "/v1/completions", {"prompt": ["a fox", "a hen"], "max_tokens": 2}),
        *_post(demo, "/v1/responses", {"input": "hello", "max_output_tokens": 16}),
        *_post(demo, "/v1/messages", {"model": "demo", "messages": chat, "max_tokens": 2}),
    ]
    with Client(demo.grpc) as client:
        stream = client.generate("a fox", max_tokens=2)
        list(stream)
        assert stream.finished is not None
        ids.append(stream.finished.request_id)
    numbers = {ids[0]: 2, ids[1]: 2, ids[4]: 2, ids[5]: 2}

    for each in ids:
        _explained(demo, each, numbers.get(each, 1))
        code, _, err = _quire("requests", "--story", each, f"--target={demo.grpc}")
        assert code == 0, err
