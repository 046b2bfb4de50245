"""A service as it stands in the open: TLS with client certificates, tokens, keys between its processes."""

import hashlib
import json
import os
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme

from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import DEFAULTS, QUIRE, ROOT, Served, free_ports, serve
from quire import Client
from quire.errors import QuireError


@dataclass(frozen=True, slots=True)
class Fortress:
    """A service that lets in few, and the papers of those."""

    served: Served
    ca: Path
    client_chain: bytes
    client_key: bytes
    stranger_chain: bytes
    stranger_key: bytes
    health: str

    def credentials(self, *, certificate: bool = True) -> grpc.ChannelCredentials:
        """For TLS, with or without a client certificate."""
        root = self.ca.read_bytes()
        if not certificate:
            return grpc.ssl_channel_credentials(root)
        return grpc.ssl_channel_credentials(root, self.client_key, self.client_chain)


@pytest.fixture(scope="module")
def fortress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fortress]:
    """Yield a service with TLS, tokens and principals."""
    folder = tmp_path_factory.mktemp("fortress")
    checkpoint = make_checkpoint("LlamaForCausalLM", folder / "model")
    ca = trustme.CA()
    server, client = ca.issue_cert("127.0.0.1", "localhost"), ca.issue_cert("search.example.org")
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    server.private_key_pem.write_to_path(str(folder / "server.key"))
    for pem in server.cert_chain_pems:
        pem.write_to_path(str(folder / "server.pem"), append=True)
    (folder / "principals.toml").write_text(
        '[principals.search]\ncertificates = ["search.example.org"]\n'
        f'[principals.token]\ntokens = ["{hashlib.sha256(b"t0ken").hexdigest()}"]\nadmin = true\n'
    )
    subprocess.run([*QUIRE, "keys", "create", str(folder / "keys")], cwd=ROOT, check=True)
    worker_port, frontend_port, health_port = free_ports(3)
    with serve(
        checkpoint,
        f"--keys={folder / 'keys'}",
        f"--worker-address=tcp://127.0.0.1:{worker_port}",
        f"--frontend-address=tcp://127.0.0.1:{frontend_port}",
        f"--tls-cert={folder / 'server.pem'}",
        f"--tls-key={folder / 'server.key'}",
        f"--tls-client-ca={folder / 'ca.pem'}",
        f"--principals={folder / 'principals.toml'}",
        f"--health-port={health_port}",
    ) as served:
        stranger = ca.issue_cert("stranger.example.org")
        yield Fortress(
            served,
            folder / "ca.pem",
            _chain(client),
            client.private_key_pem.bytes(),
            _chain(stranger),
            stranger.private_key_pem.bytes(),
            f"http://127.0.0.1:{health_port}",
        )


def test_a_client_certificate_names_the_principal(fortress: Fortress) -> None:
    """A client with a certificate for a known name is served over TLS, through processes that use CURVE."""
    with Client(fortress.served.grpc, credentials=fortress.credentials()) as client:
        completion = client.generate("the", max_tokens=4, ignore_eos=True).result()

    assert completion.finished is not None
    assert completion.finished.usage.completion_tokens == 4


def test_a_client_certificate_names_the_principal_over_http(fortress: Fortress) -> None:
    """Over HTTPS the client's certificate determines the principal; without a certificate, there is no connection.

    A valid certificate that belongs to no principal passes TLS only.
    """

    def ask(chain: bytes | None, key: bytes, folder: Path) -> int:
        context = ssl.create_default_context(cafile=str(fortress.ca))
        if chain is not None:
            (folder / "chain.pem").write_bytes(chain)
            (folder / "key.pem").write_bytes(key)
            context.load_cert_chain(folder / "chain.pem", folder / "key.pem")
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        body = json.dumps({"model": "", "prompt": "the", "max_tokens": 2}).encode()
        request = urllib.request.Request(
            f"https://{fortress.served.http}/v1/completions", body, {"content-type": "application/json"}
        )
        try:
            with opener.open(request, timeout=60) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    with tempfile.TemporaryDirectory() as folder:
        assert ask(fortress.client_chain, fortress.client_key, Path(folder)) == 200
        assert ask(fortress.stranger_chain, fortress.stranger_key, Path(folder)) == 401
        with pytest.raises(OSError, match=r"(?i)certificate|reset|closed|EOF"):
            ask(None, b"", Path(folder))


@pytest.mark.parametrize("kind", ["in the clear", "without a certificate", "with a false token"])
def test_unauthenticated_callers_get_only_an_error(fortress: Fortress, kind: str) -> None:
    """Calls without TLS, without a certificate, or with an unknown token get an error."""
    credentials = fortress.credentials(certificate=kind == "with a false token")
    secure = None if kind == "in the clear" else credentials
    token = "false" if kind == "with a false token" else ""
    with Client(fortress.served.grpc, credentials=secure, token=token) as client, pytest.raises(QuireError) as caught:
        client.generate("the", max_tokens=4, timeout=20).result()

    assert caught.value.code == ("UNAUTHENTICATED" if token else "UNAVAILABLE")


def test_probes_have_a_port_of_their_own(fortress: Fortress) -> None:
    """The port for probes serves health and metrics without TLS, and nothing else."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    assert opener.open(f"{fortress.health}/ready", timeout=10).status == 200
    assert b"quire_workers" in opener.open(f"{fortress.health}/metrics", timeout=10).read()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        opener.open(f"{fortress.health}/v1/models", timeout=10)


def test_an_open_address_is_refused(tmp_path: Path) -> None:
    """A listener that other machines can reach, without TLS, is refused in one line that names the remedy."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    failed = subprocess.run(
        [*QUIRE, "serve", f"--model={checkpoint}", "--host=0.0.0.0", "--grpc-port=0", "--http-port=0"],
        cwd=ROOT, env={**os.environ, **DEFAULTS}, capture_output=True, timeout=120, check=False,
    )  # fmt: skip

    assert failed.returncode == 1
    complaint = [line for line in failed.stderr.decode().splitlines() if not line.startswith("{")]
    assert len(complaint) == 1
    assert "host: 0.0.0.0 is reachable from other machines without authentication" in complaint[0]
    assert "--insecure" in complaint[0]


def _chain(certificate: trustme.LeafCert) -> bytes:
    return b"".join(pem.bytes() for pem in certificate.cert_chain_pems)
