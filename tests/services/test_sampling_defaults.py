"""A checkpoint's sampling defaults: which values a request gets if it omits them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from structlog.testing import capture_logs

from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from quire.v1 import model_pb2, model_pb2_grpc
from quire_server.cli import main
from services.requests.defaults import read_sampling_defaults
from shared.config import ConfigError
from tests.services.stack import MODEL, Stack, running_stack, tokens_request
from tests.services.test_process import WAIT_S, frontend

DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.125, "repetition_penalty": 1.0625}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Request values that equal the APIs' defaults."""
CHAT = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the fox"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 8},
}


def write_defaults(folder: Path, **values: Any) -> Path:
    """A folder with a generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


async def post(stack: Stack, path: str, **fields: Any) -> plan_pb2.SamplingParams:
    """The sampling parameters that a request gets."""
    answer = await stack.http.post(path, json={"model": MODEL.name, **BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    return newest(stack)


def newest(stack: Stack) -> plan_pb2.SamplingParams:
    """The sampling parameters of the newest request."""
    return plan_pb2.SamplingParams.FromString(stack.core.submissions[-1].sampling)


def values_of(params: plan_pb2.SamplingParams) -> dict[str, float]:
    """The values that a checkpoint may set; 0 is no penalty."""
    values = {name: getattr(params, name) for name in DEFAULTS}
    return values | {"repetition_penalty": values["repetition_penalty"] or 1.0}


def test_every_api_applies_the_defaults_of_the_checkpoint(tmp_path: Path) -> None:
    """A request without sampling options gets those of generation_config.json in every API.

    An explicit value wins, even if it equals the API's own default.
    """
    write_defaults(tmp_path / "model", **DEFAULTS, do_sample=True, eos_token_id=[1, 2])

    async def check() -> None:
        async with running_stack(tmp_path) as stack:
            for path in BODIES:
                assert values_of(await post(stack, path)) == pytest.approx(DEFAULTS), path
                given = {"temperature": 1.0, "top_p": 1.0}
                assert values_of(await post(stack, path, **given)) == pytest.approx(DEFAULTS | given), path
            for path in ("/v1/completions", "/v1/chat/completions"):
                assert values_of(await post(stack, path, **NEUTRAL)) == NEUTRAL, path
                assert (await post(stack, path, top_k=-1)).top_k == 0

            await stack.generate(tokens_request(5, 6))
            assert values_of(newest(stack)) == pytest.approx(DEFAULTS)
            explicit = tokens_request(5, 6)
            explicit.sampling.CopyFrom(v1.SamplingOptions(**NEUTRAL))  # type: ignore[arg-type]
            await stack.generate(explicit)
            assert values_of(newest(stack)) == NEUTRAL

            engine = pb_grpc.VllmEngineStub(stack.channel)
            for sampling, expected in (
                ({}, DEFAULTS),
                ({"temperature": 1.0, "top_p": 1.0, "top_k": 2**32 - 1}, DEFAULTS | {**NEUTRAL, "min_p": 0.125}),
            ):
                params = pb.SamplingParams(
                    max_tokens=4, **({"repetition_penalty": 1.0} if sampling else {}), **sampling
                )
                tokens = pb.TokenizedInput(input_ids=[5, 6])
                async for _ in engine.Generate(pb.GenerateRequest(tokenized=tokens, sampling_params=params)):
                    pass
                assert values_of(newest(stack)) == pytest.approx(expected)

    asyncio.run(check())


def test_a_response_reports_the_values_that_applied(tmp_path: Path) -> None:
    """The Responses API repeats temperature and top_p: the request's own, else those of the checkpoint."""
    write_defaults(tmp_path / "model", **DEFAULTS)

    async def check() -> None:
        async with running_stack(tmp_path) as stack:
            answers = [
                (await stack.http.post("/v1/responses", json={"input": "hello", **given})).json()
                for given in ({}, {"temperature": 0.25, "top_p": 1.0})
            ]
            assert [(each["temperature"], each["top_p"]) for each in answers] == [(0.6, 0.9), (0.25, 1.0)]

    asyncio.run(check())


def test_max_new_tokens_limits_every_request(tmp_path: Path) -> None:
    """It is the default of requests that set no max_tokens, and larger values are reduced to it, as in vLLM."""
    write_defaults(tmp_path / "model", max_new_tokens=12)

    async def check() -> None:
        async with running_stack(tmp_path, default_max_tokens=0) as stack:
            for path, fields, expected in (
                ("/v1/chat/completions", {}, 12),
                ("/v1/chat/completions", {"max_tokens": 40}, 12),
                ("/v1/chat/completions", {"max_completion_tokens": 5}, 5),
                ("/v1/completions", {}, 12),
                ("/v1/responses", {"max_output_tokens": 13}, 12),
                ("/v1/messages", {"max_tokens": 4096}, 12),
            ):
                await post(stack, path, **fields)
                assert stack.core.submissions[-1].max_tokens == expected, (path, fields)
            refused = await stack.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 40, "min_tokens": 13})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "min_tokens"
            assert "max_new_tokens" in refused.json()["error"]["message"]
        async with running_stack(
            tmp_path / "less", generation_config=str(tmp_path / "model"), default_max_tokens=7
        ) as s:
            await post(s, "/v1/chat/completions")
            assert s.core.submissions[-1].max_tokens == 7

    asyncio.run(check())


@pytest.mark.parametrize("choice", ["none", "folder", "file", "auto"])
def test_the_setting_selects_the_file(tmp_path: Path, choice: str) -> None:
    """`none` applies nothing, a path another file, and a checkpoint without the file has no defaults."""
    if choice != "auto":
        write_defaults(tmp_path / "model", temperature=0.6)
    other = write_defaults(tmp_path / "other", temperature=0.2)
    setting = {"folder": str(other), "file": str(other / "generation_config.json")}.get(choice, choice)

    async def check() -> float:
        async with running_stack(tmp_path, generation_config=setting) as stack:
            return (await post(stack, "/v1/completions")).temperature

    expected = 1.0 if choice in ("none", "auto") else 0.2
    assert asyncio.run(check()) == pytest.approx(expected)


def test_operators_see_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One log line lists them at start; both model descriptions and `quire models` contain them."""
    write_defaults(tmp_path / "model", **DEFAULTS, max_new_tokens=12)
    expected = pytest.approx(DEFAULTS | {"max_new_tokens": 12})

    async def check() -> None:
        with capture_logs() as lines:
            async with running_stack(tmp_path) as stack:
                (line,) = [line for line in lines if line["event"] == "sampling defaults"]
                assert line["source"] == str(tmp_path / "model" / "generation_config.json")
                assert {name: line[name] for name in (*DEFAULTS, "max_new_tokens")} == expected

                (model,) = (await stack.http.get("/v1/models")).json()["data"]
                assert model["sampling_defaults"] == expected
                stub = model_pb2_grpc.ModelServiceStub(stack.channel)
                described = (await stub.GetModel(model_pb2.GetModelRequest())).model
                assert dict(described.sampling_defaults) == expected
                engine = pb_grpc.VllmEngineStub(stack.channel)
                of_router = await engine.GetModelInfo(pb.GetModelInfoRequest())
                assert json.loads(of_router.default_sampling_params_json) == expected

                assert await asyncio.to_thread(main.main, ["models", "--target", stack.target]) == 0
                shown = "max_new_tokens=12 min_p=0.125 repetition_penalty=1.0625 temperature=0.6 top_k=20 top_p=0.9"
                assert capsys.readouterr().out.splitlines()[-1].endswith(shown)
                assert await asyncio.to_thread(main.main, ["models", "--json", "--target", stack.target]) == 0
                assert json.loads(capsys.readouterr().out)[0]["sampling_defaults"] == expected

    asyncio.run(check())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "invalid JSON at line 1"),
        ("[1]", "must be a JSON object"),
        ('{"temperature": "hot"}', "temperature: must be a number"),
        ('{"temperature": NaN}', r"temperature: must lie in \[0, 100\]"),
        (f'{{"temperature": 1{"0" * 400}}}', r"temperature: must lie in \[0, 100\]"),
        ('{"top_p": 0}', r"top_p: must lie in \(0, 1\]"),
        ('{"top_k": 2.5}', "top_k: must be an integer"),
        ('{"top_k": true}', "top_k: must be an integer"),
        ('{"min_p": 2}', r"min_p: must lie in \[0, 1\]"),
        ('{"repetition_penalty": 0}', r"repetition_penalty: must lie in \[0.001, 10\]"),
        ('{"max_new_tokens": 0}', "max_new_tokens: must lie in"),
    ],
)
def test_a_wrong_value_is_refused_by_name(tmp_path: Path, text: str, what: str) -> None:
    """The error names the file, the value and the remedy."""
    path = tmp_path / "generation_config.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=f"generation_config: {path}: {what}.*; .*--generation-config none"):
        read_sampling_defaults("auto", tmp_path)


@pytest.mark.parametrize(("text", "top_k"), [('{"top_k": -1}', 0), ('{"top_k": null}', None), ("{}", None)])
def test_null_and_minus_one_are_no_limit(tmp_path: Path, text: str, top_k: int | None) -> None:
    """-1 is "all tokens", and null is an absent value."""
    (tmp_path / "generation_config.json").write_text(text)

    assert read_sampling_defaults("auto", tmp_path).values.get("top_k") == top_k


@pytest.mark.every(3)
def test_a_malformed_file_ends_the_process_with_one_line(tmp_path: Path) -> None:
    """A front end does not start with defaults other than those that the operator expects."""
    bad = tmp_path / "bad.json"
    bad.write_text('{"temperature": 0.6,}')
    for setting in (bad, tmp_path / "missing"):
        with frontend(tmp_path, f"--generation-config={setting}") as process:
            _, err = process.communicate(timeout=WAIT_S)

        (line,) = err.splitlines()
        assert line.startswith(f"quire frontend: generation_config: {setting}")
        assert process.returncode == 1
