"""Principals: how callers are identified, and their permissions."""

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.admin.v1 import admin_pb2, admin_pb2_grpc
from quire.v1 import generation_pb2 as v1
from quire_server.cli.keys import add_principal
from services.access.principals import Principal, Principals, read_api_keys
from shared.config import ConfigError
from shared.errors import PermissionDeniedError, UnauthenticatedError
from tests.services.stack import Stack, running_stack, tokens_request

FILE = """
[principals.search]
tokens = ["{search}"]
certificates = ["search.example.org"]
tenants = ["search", "batch"]
cache_scopes = ["team"]

[principals.operator]
tokens = ["sha256:{operator}"]
tenants = ["*"]
cache_scopes = ["*"]
admin = true
"""


def _written(folder: Path, **tokens: str) -> Path:
    path = folder / "principals.toml"
    digests = {name: hashlib.sha256(token.encode()).hexdigest() for name, token in tokens.items()}
    path.write_text(FILE.format(**digests))
    return path


def _known(tmp_path: Path) -> Principals:
    return Principals(str(_written(tmp_path, search="s3cret", operator="0p")), anonymous_is_admin=False)


def test_tokens_and_certificates_name_principals(tmp_path: Path) -> None:
    """A known token or certificate names a principal; others name none, and no error shows how close they are."""
    principals = _known(tmp_path)

    assert principals.identify("Bearer s3cret").name == "search"
    assert principals.identify("bearer 0p").name == "operator"
    assert principals.identify("", ["other", "search.example.org"]).name == "search"
    for wrong in ("", "s3cret", "Bearer", "Bearer s3cre", "Basic s3cret", "Bearer " + "x" * 5000):
        with pytest.raises(UnauthenticatedError):
            principals.identify(wrong, ["other"])
    with pytest.raises(UnauthenticatedError):
        principals.identify("Bearer wrong", ["search.example.org"])


@pytest.mark.parametrize("is_admin", [True, False])
def test_an_api_key_gives_the_permissions_of_an_anonymous_caller(tmp_path: Path, is_admin: bool) -> None:
    """With keys, callers without one are refused; principals from a file are served too."""
    path = _written(tmp_path, search="s3cret", operator="0p")
    principals = Principals(str(path), api_keys=["first", "second"], anonymous_is_admin=is_admin)
    keys_only = Principals("", api_keys=["first"], anonymous_is_admin=is_admin)

    for known in (principals.identify("Bearer second"), keys_only.identify("Bearer first")):
        assert (known.name, known.is_admin, known.tenant("any")) == ("anonymous", is_admin, "any")
    assert principals.identify("Bearer s3cret").name == "search"
    for caller in ("", "Bearer s3cret", "Bearer second", "first"):
        with pytest.raises(UnauthenticatedError):
            keys_only.identify(caller)


def test_api_keys_come_from_the_variable_and_the_file(tmp_path: Path) -> None:
    """Blanks and empty lines around keys do not count; a mistake is named, the key is not shown."""
    path = tmp_path / "keys"
    path.write_text("third\n\n  fourth \n")

    assert read_api_keys("first, second,", str(path)) == ["first", "second", "third", "fourth"]
    assert read_api_keys("", "") == []
    with pytest.raises(ConfigError, match=r"^QUIRE_API_KEY, key 2: not a bearer token; [^b]*"):
        read_api_keys("a,b b", "")
    path.write_text("\n")
    with pytest.raises(ConfigError, match="contains no key"):
        read_api_keys("", str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_api_keys("", str(tmp_path / "none"))


def test_a_file_that_does_not_exist_is_named_with_the_remedy(tmp_path: Path) -> None:
    """The start fails with one line, which names the command that creates the file."""
    with pytest.raises(ConfigError, match=r"none\.toml does not exist; create it with quire keys principal$"):
        Principals(str(tmp_path / "none.toml"), anonymous_is_admin=False)


def test_a_tenant_of_others_is_named_as_clients_call_it(tmp_path: Path) -> None:
    """Errors of HTTP have the field's HTTP name, in every API."""
    path = tmp_path / "principals.toml"
    path.write_text(f'[principals.a]\ntokens = ["{hashlib.sha256(b"token").hexdigest()}"]\ntenants = ["a"]\n')
    turns = [{"role": "user", "content": "x"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": turns},
        "/v1/responses": {"input": "x"},
    }

    async def main() -> None:
        async with running_stack(tmp_path, principals=str(path)) as stack:
            for api, body in bodies.items():
                for field in ("tenant", "cache_salt"):
                    response = await stack.http.post(
                        api, json={**body, field: "of others"}, headers={"authorization": "Bearer token"}
                    )
                    error = response.json()["error"]
                    assert (response.status_code, error["param"]) == (403, field), api
                    assert error["message"].startswith(f"{field}: principal a may not ")

    asyncio.run(main())


def test_a_principal_acts_for_its_tenants_only(tmp_path: Path) -> None:
    """A request's claim counts only if its principal has permission; without a claim, the first tenant applies."""
    principals = _known(tmp_path)
    search, operator = principals.identify("Bearer s3cret"), principals.identify("Bearer 0p")

    assert (search.tenant(""), search.tenant("batch")) == ("search", "batch")
    assert (operator.tenant(""), operator.tenant("anybody")) == ("", "anybody")
    search.check_scope("team")
    search.check_scope("")
    operator.check_admin()
    for forbidden in (
        lambda: search.tenant("other"),
        lambda: search.check_scope("others"),
        search.check_admin,
    ):
        with pytest.raises(PermissionDeniedError):
            forbidden()


def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    """A removed token is invalid from then on; a file that cannot be read changes nothing."""
    principals = _known(tmp_path)
    path = _written(tmp_path, search="fresh", operator="0p")
    os.utime(path, ns=(1, 1))
    principals._next_check = 0.0

    assert principals.identify("Bearer fresh").name == "search"
    with pytest.raises(UnauthenticatedError):
        principals.identify("Bearer s3cret")
    path.write_text("[principals.search")
    os.utime(path, ns=(2, 2))
    principals._next_check = 0.0
    assert principals.identify("Bearer fresh").name == "search"


def test_callers_without_known_credentials_are_served_if_the_file_says_so(tmp_path: Path) -> None:
    """`[anonymous]` admits them with its permissions, without a restart, and never as operators."""
    path = _written(tmp_path, search="s3cret", operator="0p")
    principals = Principals(str(path), anonymous_is_admin=True)
    with pytest.raises(UnauthenticatedError):
        principals.identify("")
    path.write_text(path.read_text() + '[anonymous]\ntenants = ["public", "batch"]\n')
    os.utime(path, ns=(1, 1))
    principals._next_check = 0.0

    assert principals.identify("Bearer 0p").is_admin
    for authorization in ("", "Bearer EMPTY", "Basic x", "Bearer " + "x" * 5000):
        caller = principals.identify(authorization, ["other"])
        assert (caller.name, caller.tenant(""), caller.tenant("batch")) == ("anonymous", "public", "batch")
        assert not caller.is_admin
        with pytest.raises(PermissionDeniedError):
            caller.tenant("other")
        with pytest.raises(PermissionDeniedError):
            caller.check_scope("team")


def test_a_principal_is_added_to_a_file(tmp_path: Path) -> None:
    """The file is created or extended, keeps its content, and accepts the printed token."""
    path = tmp_path / "principals.toml"
    operator = add_principal(path, "operator", is_admin=True)
    path.write_text('[anonymous]\ntenants = ["*"]\n\n' + path.read_text())
    search = add_principal(path, "search", is_admin=False)
    principals = Principals(str(path), anonymous_is_admin=False)

    assert principals.identify(f"Bearer {operator}").is_admin
    assert principals.identify(f"Bearer {search}") == Principal("search")
    assert principals.identify("").name == "anonymous"
    content = path.read_text()
    for name, message in (
        ("search", "already has a principal search"),
        ("a.b", "not the name"),
        ("anonymous", "not the name"),
    ):
        with pytest.raises(ConfigError, match=message):
            add_principal(path, name, is_admin=False)
    assert path.read_text() == content


@pytest.mark.parametrize(
    "content",
    ["anonymous = true", "[anonymous]\nadmin = true", "[anonymous]\ntenants = '*'",
     "[principals.anonymous]\ntenants = []", "x = 1", "[principals]\na = 1", "[principals.a]\ntoken = []",
     "[principals.a]\ntokens = ['plain']",
     "[principals.a]\ntenants = 'a'", "[principals.a]\nadmin = 'yes'", "[principals.a"],
)  # fmt: skip
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, content: str) -> None:
    """If the file has a mistake, the start fails with one line that names it."""
    path = tmp_path / "principals.toml"
    path.write_text(content)

    with pytest.raises(ConfigError, match="principals"):
        Principals(str(path), anonymous_is_admin=False)


def test_callers_without_a_token_are_refused(tmp_path: Path) -> None:
    """Callers without a valid token are refused by gRPC and HTTP before anything reaches the core; probes answer.

    A known caller is served under its own tenant and cache scope. The operator API is for operators.
    """
    path = _written(tmp_path, search="s3cret", operator="0p")

    async def main() -> None:
        async with running_stack(tmp_path, principals=str(path)) as stack:
            await stack.until_ready()
            for authorization in ((), (("authorization", "Bearer wrong"),)):
                assert await _code(stack, authorization) is grpc.StatusCode.UNAUTHENTICATED
            for headers in ({}, {"authorization": "Bearer wrong"}):
                answer = await stack.http.post(
                    "/v1/completions", json={"model": "echo", "prompt": "a"}, headers=headers
                )
                assert answer.status_code == 401
            assert (await stack.http.get("/ready")).status_code == 200
            assert not stack.core.submissions

            search, operator = (("authorization", "Bearer s3cret"),), (("authorization", "Bearer 0p"),)
            assert await _code(stack, search) is grpc.StatusCode.OK
            assert await _code(stack, search, tenant="others") is grpc.StatusCode.PERMISSION_DENIED
            assert await _code(stack, search, cache_scope="others") is grpc.StatusCode.PERMISSION_DENIED
            (submission,) = stack.core.submissions
            assert (submission.tenant, submission.cache_scope) == ("search", b"principal\0search")
            answer = await stack.http.post(
                "/v1/completions",
                json={"model": "echo", "prompt": "a", "max_tokens": 2},
                headers={"authorization": "Bearer s3cret"},
            )
            assert answer.status_code == 200
            assert await _admin_code(stack, ()) is grpc.StatusCode.UNAUTHENTICATED
            assert await _admin_code(stack, search) is grpc.StatusCode.PERMISSION_DENIED
            assert await _admin_code(stack, operator) is not grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(main())


async def _code(stack: Stack, metadata: tuple[tuple[str, str], ...], **options: str) -> grpc.StatusCode:
    request = tokens_request(1, 2, 3, max_tokens=2)
    request.scheduling.MergeFrom(v1.SchedulingOptions(**options))  # type: ignore[arg-type]
    call = stack.generation.Generate(request, metadata=metadata)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def _admin_code(stack: Stack, metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
    stub = admin_pb2_grpc.AdminServiceStub(stack.channel)
    try:
        await stub.ListWorkers(admin_pb2.ListWorkersRequest(), metadata=metadata, timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_the_documented_file_means_what_the_page_says(tmp_path: Path) -> None:
    """The example in SECURITY.md is a valid file, and the token it names identifies the first principal."""
    page = (Path(__file__).resolve().parents[2] / "SECURITY.md").read_text(encoding="utf-8")
    path = tmp_path / "principals.toml"
    path.write_text(page.partition("```toml\n")[2].partition("```")[0])

    search = Principals(str(path), anonymous_is_admin=False).identify("Bearer secret")

    assert (search.name, search.tenants, search.cache_scopes, search.is_admin) == (
        "search",
        ("search", "batch"),
        ("team",),
        False,
    )
    assert Principals(str(path), anonymous_is_admin=False).identify("", ["search.example.org"]) == search
