"""A small node: runs the pods of rendered manifests as a kubelet would, without containers.

Each pod is a process with the manifest's command, environment and user. It has a network namespace with its own
address. In its mount namespace, the root is read-only and the manifest's volumes are mounted. Secrets are owned by
root, with the group and mode that Kubernetes sets. Services have names in /etc/hosts.

Run this in fresh namespaces, which clean up all processes and mounts when they end:

    unshare --net --mount --pid --fork --kill-child --mount-proc python -m tests.deploy.drills EXAMPLE
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.manifests import ROOT, Pod

NETWORK = "10.93.0"
BRIDGE = "quire-node"
SCHEDULER_IP = f"{NETWORK}.2"
"""The address of the Service, which the pod has as well: here no packet is rewritten."""
_WAIT_S = 600
"""Patience with a pod that starts, for a machine with busy cores."""
_CHOSEN = 1000660000
"""User and group of volumes that a cluster chooses if the manifest has none, as OpenShift does. Its group is 0."""
ENTRY_POINTS = {"quire-scheduler": ["quire"], "quire-worker": ["quire", "worker"]}
"""By image: its entry point. A test compares them with the Dockerfiles."""


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr}")
    return done.stdout


def _open_interpreter() -> None:
    """Let other users reach the interpreter, where it is installed in a folder of root's."""
    prefix = Path(sys.base_prefix)
    closed = next((each for each in reversed(prefix.parents) if not each.stat().st_mode & 0o001), None)
    if closed is None:
        return
    held = Path("/run/interpreter")
    held.mkdir()
    _run("mount", "--bind", str(prefix), str(held))
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(closed))
    prefix.mkdir(parents=True)
    _run("mount", "--bind", str(held), str(prefix))


def _check_confined(running: "Running") -> None:
    """Check that a pod has the manifest's user, no capabilities, a read-only root, and its own network.

    The system-call filter is missing, because it is part of the container runtime.
    """
    process = Path("/proc") / str(running.process.pid)
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
    security = running.pod.spec["securityContext"]
    rights = {status[name] for name in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")}
    roots = [line.split() for line in (process / "mountinfo").read_text().splitlines() if line.split()[4] == "/"]
    expected = {
        "user": status["Uid"].split() == [str(security.get("runAsUser", _CHOSEN))] * 4,
        "group": status["Gid"].split() == [str(security.get("runAsGroup", 0))] * 4,
        "capabilities": rights == {"0" * 16},
        "privilege escalation": status["NoNewPrivs"] == "1",
        "read-only root": "ro" in roots[-1][5].split(","),
        "network": os.readlink(process / "ns" / "net") != os.readlink("/proc/self/ns/net"),
    }
    if wrong := [name for name, is_right in expected.items() if not is_right]:
        raise RuntimeError(f"{running.name}: not as its manifest demands: {', '.join(wrong)}")


@dataclass(slots=True)
class Running:
    """A pod that runs."""

    name: str
    pod: Pod
    address: str
    process: "subprocess.Popen[bytes]"
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    said: str = ""
    """What its last probe printed."""


class Node:
    """Starts and ends pods."""

    def __init__(
        self,
        folder: Path,
        secrets: dict[str, Mapping[str, bytes]],
        maps: Mapping[str, Any],
    ) -> None:
        """Set up the network of this namespace.

        Args:
            folder: for volumes and logs.
            secrets: content of the secrets by name.
            maps: content of the ConfigMaps by name.
        """
        self._folder, self._secrets, self._maps = folder, secrets, maps
        self._claims: dict[str, Path] = {}
        self._groups: dict[str, int] = {}
        """Group of each pod's volumes."""
        self._made: list[Path] = []
        """Mount points that this machine did not have."""
        self._next = 10
        self.pods: dict[str, Running] = {}
        _run("mount", "--make-rprivate", "/")
        _run("mount", "-t", "tmpfs", "tmpfs", "/run")
        _run("ip", "link", "set", "lo", "up")
        # A bridge without its own address uses the address of one of its ports, which changes when pods leave. Frames
        # sent to the old address would be lost.
        _run("ip", "link", "add", BRIDGE, "address", "02:00:00:00:00:01", "type", "bridge")
        _run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        _open_interpreter()
        tools = folder / "bin"
        tools.mkdir()
        (tools / "quire").write_text(f'#!/bin/sh\nexec {sys.executable} -m quire_server.entry "$@"\n')
        (tools / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        for tool in tools.iterdir():
            tool.chmod(0o755)
        folder.chmod(0o755)

    def start(self, pod: Pod, image: str, *, suffix: str = "") -> Running:
        """Start a pod; `ready` waits for its probes."""
        name = f"{pod.name}-{suffix or self._next}"
        self._groups[name] = pod.spec["securityContext"].get("fsGroup", _CHOSEN)
        address = SCHEDULER_IP if pod.role == "scheduler" else f"{NETWORK}.{self._next}"
        self._next += 1
        self._connect(name, address)
        environment = self._environment(pod, name)
        home = self._folder / name
        home.mkdir()
        script = home / "start.sh"
        security, container = pod.spec["securityContext"], pod.container
        command = shlex.join([*ENTRY_POINTS[image], *container.get("args", [])])
        user = shlex.join(self._user(security))
        assigned = shlex.join(f"{key}={value}" for key, value in environment.items())
        script.write_text("\n".join(["set -eu", *self._mounts(pod, home), f"exec {user} env -i {assigned} {command}"]))
        log = self._folder / f"{name}.log"
        process = subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "--mount", "--propagation", "private", "bash", str(script)],
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        running = self.pods[name] = Running(name, pod, address, process, log, environment)
        return running

    def ready(self, running: Running) -> None:
        """Wait until the startup and readiness probes succeed."""
        for kind in ("startupProbe", "readinessProbe"):
            end = time.monotonic() + _WAIT_S
            while not self.probe(running, kind):
                if running.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{running.name}: not ready: {running.said}\n{running.log.read_text()[-3000:]}")
                time.sleep(0.2)
        _check_confined(running)

    def probe(self, running: Running, kind: str) -> bool:
        """Return whether a probe succeeds now, asked as a kubelet asks it."""
        probe = running.pod.container[kind]
        if "exec" in probe:
            done = subprocess.run([*self._inside(running), *probe["exec"]["command"]], capture_output=True, text=True)
            running.said = done.stderr
            return done.returncode == 0
        port = running.pod.ports()[probe["httpGet"]["port"]]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            opener.open(f"http://{running.address}:{port}{probe['httpGet']['path']}", timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    def execute(self, running: Running, command: Sequence[str], given: str = "") -> str:
        """Return what a command prints in a pod, as `kubectl exec -i` runs it.

        Args:
            running: the pod.
            command: the command and its arguments.
            given: what it reads from its standard input.
        """
        done = subprocess.run([*self._inside(running), *command], input=given, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}: {done.stderr}")
        return done.stdout

    def _inside(self, running: Running) -> list[str]:
        user = self._user(running.pod.spec["securityContext"])
        assigned = [f"{key}={value}" for key, value in running.environment.items()]
        return ["nsenter", "-t", str(running.process.pid), "-m", "-n", *user, "env", "-i", *assigned]

    def stop(self, running: Running) -> int:
        """End a pod: pre-stop wait, SIGTERM, and the kubelet's patience; return the exit code."""
        hook = running.pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        time.sleep(hook)
        running.process.terminate()
        code = running.process.wait(running.pod.spec["terminationGracePeriodSeconds"] - hook)
        self.remove(running)
        return code

    def kill(self, running: Running) -> None:
        """End a pod as a lost machine does."""
        running.process.kill()
        running.process.wait(30)
        self.remove(running)

    def remove(self, running: Running) -> None:
        """Forget a pod that has ended."""
        del self.pods[running.name]
        _run("ip", "netns", "del", running.name)

    def write(self, secret: str, content: Mapping[str, bytes]) -> None:
        """Change a secret, also where it is mounted."""
        self._secrets[secret] = content
        for folder in self._folder.glob(f"*/secret-{secret}"):
            self._fill(folder, content, 0o440, self._groups[folder.parent.name])

    def _connect(self, name: str, address: str) -> None:
        short = f"v{self._next}"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", short, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", short, "master", BRIDGE, "up")
        # Reuse one MAC per IP address, so that neighbours need not drop the entry for an earlier pod.
        hardware = f"02:00:00:00:00:{int(address.rpartition('.')[2]):02x}"
        _run("ip", "-n", name, "link", "set", "eth0", "address", hardware)
        _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _environment(self, pod: Pod, name: str) -> dict[str, str]:
        """Return the variables with their references resolved, and those that the image has."""
        found = {"PATH": f"{self._folder / 'bin'}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": "/"}
        for each in pod.container["env"]:
            if "value" in each:
                found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], each["value"])
            elif "secretKeyRef" in each["valueFrom"]:
                reference = each["valueFrom"]["secretKeyRef"]
                found[each["name"]] = self._secrets[reference["name"]][reference["key"]].decode()
            elif "fieldRef" in each["valueFrom"]:
                assert each["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
                found[each["name"]] = name
            else:
                assert each["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"
                found[each["name"]] = pod.container["resources"]["limits"]["cpu"]
        return found

    def _user(self, security: Mapping[str, Any]) -> list[str]:
        return [
            "setpriv", f"--reuid={security.get('runAsUser', _CHOSEN)}", f"--regid={security.get('runAsGroup', 0)}",
            f"--groups={security.get('fsGroup', _CHOSEN)}", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs",
        ]  # fmt: skip

    def _mounts(self, pod: Pod, home: Path) -> list[str]:
        """Return the shell commands that mount the volumes, and make the root read-only."""
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for name in ("etc", "run", "lib"):
            (home / name).mkdir()
        shutil.copytree("/etc", home / "etc", symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("ssl"))
        (home / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n{SCHEDULER_IP} quire-scheduler\n")
        outside = {"/etc": home / "etc", "/run": home / "run", "/var/lib": home / "lib"}
        lines: list[str] = []
        binds: list[str] = []
        for mount in pod.container["volumeMounts"]:
            source = self._volume(volumes.get(mount["name"]), mount["name"], home, pod)
            target = mount["mountPath"]
            if "subPath" in mount:
                source /= mount["subPath"]
            for root, folder in outside.items():
                if target.startswith(root + "/"):
                    place = folder / target.removeprefix(root + "/")
                    place.parent.mkdir(parents=True, exist_ok=True)
                    if source.is_dir():
                        place.mkdir(exist_ok=True)
                    else:
                        place.touch()
            if not Path(target).exists() and not target.startswith(tuple(f"{root}/" for root in outside)):
                Path(target).mkdir()
                self._made.append(Path(target))
            binds.append(f"mount --bind {shlex.quote(str(source.resolve()))} {shlex.quote(target)}")
            if mount.get("readOnly"):
                binds.append(f"mount -o remount,bind,ro {shlex.quote(target)}")
        for root, folder in outside.items():
            lines.append(f"mount --bind {shlex.quote(str(folder))} {root}")
        # Mount parents before the mounts inside them. The root's write protection does not extend to the volumes.
        binds.sort(key=lambda line: "/tmp" in line.split()[-1])
        return [*lines, *binds, "mount -o remount,bind,ro /"]

    def _volume(self, volume: Any, name: str, home: Path, pod: Pod) -> Path:
        group = self._groups[home.name]
        if volume is None:  # A claim of the StatefulSet outlives the pod.
            claim = self._folder / f"claim-{pod.name}-{name}"
            claim.mkdir(exist_ok=True)
            os.chown(claim, 0, group)
            claim.chmod(0o2770)
            return claim
        if "emptyDir" in volume:
            folder = home / f"empty-{name}"
            folder.mkdir()
            os.chown(folder, 0, group)
            folder.chmod(0o2777)
            return folder
        if "configMap" in volume:
            content = {key: text.encode() for key, text in self._maps[volume["configMap"]["name"]].items()}
            folder = home / f"map-{name}"
            self._fill(folder, content, 0o644, group)
            return folder
        if "persistentVolumeClaim" in volume:
            claim = self._claims.setdefault(
                volume["persistentVolumeClaim"]["claimName"],
                self._folder / volume["persistentVolumeClaim"]["claimName"],
            )
            claim.mkdir(exist_ok=True)
            os.chown(claim, 0, group)
            claim.chmod(0o2770)
            return claim
        secret = volume["secret"]["secretName"]
        folder = home / f"secret-{secret}"
        self._fill(folder, self._secrets[secret], volume["secret"]["defaultMode"], group)
        return folder

    def _fill(self, folder: Path, content: Mapping[str, bytes], mode: int, group: int) -> None:
        """Write a volume as the kubelet does: files are links into a folder that is exchanged at once."""
        folder.mkdir(exist_ok=True)
        version = folder / f"..{time.monotonic_ns()}"
        version.mkdir()
        for name, data in content.items():
            (version / name).write_bytes(data)
            os.chown(version / name, 0, group)
            (version / name).chmod(mode)
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(Path("..data") / name)
        for link in folder.iterdir():
            if link.is_symlink() and link.name != "..data" and link.name not in content:
                link.unlink()
        (folder / "..new").symlink_to(version.name)
        os.rename(folder / "..new", folder / "..data")

    def end(self) -> None:
        """Kill the remaining processes."""
        for running in list(self.pods.values()):
            with contextlib.suppress(Exception):
                self.kill(running)
        for place in self._made:
            place.rmdir()
