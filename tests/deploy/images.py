"""Builds and runs images from their Dockerfiles without a container engine: the same commands, in an empty root.

`mmdebstrap` creates the root of the base image `debian:bookworm-slim` from the image's Debian packages.
Each COPY and RUN makes a layer, the upper folder of an overlay over the layers below. A container is a process with the
layers as its read-only root, and with the image's user, environment and entry point. Layers are stored by content in
`build/images`, as in a container engine; delete the folder to start anew. All of this requires root.

The reader knows the instructions and forms that our Dockerfiles have, and refuses others.
"""

import fnmatch
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.deploy.manifests import ROOT

STORE = ROOT / "build" / "images"
_BASE = "debian:bookworm-slim"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEBIAN = [
    "mmdebstrap", "--quiet", "--variant=minbase", "--include=usr-is-merged",
    *(f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("doc", "info", "lintian", "locale", "man")),
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
    # The image already has the merged layout. It lacks the Perl program that merges a system.
    '--customize-hook=chroot "$1" apt-get purge --quiet --yes usrmerge perl "perl-modules-*" "libperl5*" '
    '"lib*-perl" "libgdbm*"',
    "bookworm",
]  # fmt: skip
"""Makes the folder named next. Debian leaves the same files out of its slim images."""
_APT = 'Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache ""; APT::Keep-Downloaded-Packages "false";\n'
"""As in the base image: apt keeps no caches."""
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True, slots=True)
class Instruction:
    """A line of a Dockerfile with its continuations."""

    name: str
    value: str

    def words(self) -> list[str]:
        """Return the arguments of COPY, without flags."""
        return [each for each in self.value.split() if not each.startswith("--")]

    def flag(self, name: str) -> str:
        """Return the value of a flag, or nothing."""
        return next((each.partition("=")[2] for each in self.value.split() if each.startswith(f"--{name}=")), "")


def dockerfile(image: str) -> Path:
    """Return the Dockerfile of an image."""
    return ROOT / "deploy" / f"Dockerfile.{image}"


def read(path: Path) -> list[Instruction]:
    """Return the instructions of a Dockerfile."""
    lines = [
        line for line in path.read_text("utf-8").splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", "")
    return [
        Instruction(name, value.strip()) for name, _, value in (line.partition(" ") for line in joined.splitlines())
    ]


def context(path: Path) -> list[str]:
    """Return the files, relative to the repository, that the .dockerignore of a Dockerfile lets into the build."""
    patterns = [line for line in Path(f"{path}.dockerignore").read_text("utf-8").splitlines() if line[:1] != "#"]
    assert patterns[0] == "*", "everything is left out first"
    assert patterns[-1] == "**/__pycache__", "compiled files are left out last"
    found = []
    for pattern in patterns[1:-1]:
        assert pattern.startswith("!"), f"{pattern}: this form is not known here"
        matched = list(ROOT.glob(pattern[1:]))
        assert matched, f"{path.name}.dockerignore: {pattern} matches nothing"
        for each in matched:
            found += [each] if each.is_file() else [file for file in each.rglob("*") if file.is_file()]
    return sorted(str(file.relative_to(ROOT)) for file in found if "__pycache__" not in file.parts)


def sources(instruction: Instruction, files: Sequence[str]) -> dict[str, str]:
    """Return the context files that a COPY uses, with their paths below its target."""
    *patterns, target = instruction.words()
    found: dict[str, str] = {}
    for pattern in patterns:
        for file in files:
            if pattern == "." or file.startswith(f"{pattern}/"):
                found[file] = os.path.join(target, os.path.relpath(file, pattern))
            elif fnmatch.fnmatch(file, pattern):
                found[file] = os.path.join(target, Path(file).name) if target.endswith("/") else target
    return found


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with its variables replaced."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: values[found[1] or found[2]], text)


@dataclass(frozen=True, slots=True)
class Image:
    """Layers, lowest first, and how a container starts."""

    layers: tuple[Path, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    folder: str = "/"
    user: int = 0
    entry_point: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all layers, as `docker images` prints them."""
        return sum(size_of(layer) for layer in self.layers)

    @property
    def pulled(self) -> int:
        """Bytes of the compressed layers, which a node downloads and a registry prints."""
        return sum(_compressed(layer) for layer in self.layers)

    def container(
        self, *arguments: str, entry_point: Sequence[str] = (), mounts: Mapping[str, Path] | None = None
    ) -> list[str]:
        """Return a container's command: read-only root, no capabilities, its own /tmp, the host's network.

        Args:
            arguments: instead of the image's command.
            entry_point: instead of that of the image.
            mounts: folders of the host by their place in the container.
        """
        mounts = {"/tmp": self._scratch("tmp"), **(mounts or {})}
        places = self._scratch("places")
        for place in mounts:
            (places / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
        root = self._scratch("root")
        started = [*(entry_point or self.entry_point), *(arguments or self.command)]
        user = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", "--no-new-privs",
                "--bounding-set=-all", "--inh-caps=-all"]  # fmt: skip
        variables = [f"{name}={value}" for name, value in {**self.environment, "HOME": "/tmp"}.items()]
        script = [_overlay(root, (*self.layers, places)), *_devices(root)]
        script += [f"mount --bind {shlex.quote(str(folder))} {root}{place}" for place, folder in mounts.items()]
        script += [f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp"]
        script += [
            f"exec {shlex.join(['chroot', str(root), *user, 'env', '-i', '-C', self.folder, *variables, *started])}"
        ]
        return ["unshare", "--mount", "bash", "-euc", "\n".join(script)]

    def _scratch(self, name: str) -> Path:
        folder = STORE / "run" / self.layers[-1].name / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder; a file with two names counts once."""
    done = subprocess.run(
        ["du", "--summarize", "--bytes", str(folder)], check=True, capture_output=True, text=True, timeout=120
    )
    return int(done.stdout.split()[0])


def _compressed(folder: Path) -> int:
    command = f"tar --create --directory {shlex.quote(str(folder))} . | gzip -6 | wc --bytes"
    return int(subprocess.run(["bash", "-c", command], check=True, capture_output=True, timeout=1800).stdout)


def build(name: str, mounts: Mapping[str, Path] | None = None, **arguments: str) -> Image:
    """Return the image of a Dockerfile, as `docker build` with these --build-arg makes it.

    Args:
        name: `scheduler` or `worker`.
        mounts: host folders that RUN sees, by mount point.
        arguments: values of ARG.
    """
    path = dockerfile(name)
    files = context(path)
    stages: dict[str, Image] = {}
    defaults: dict[str, str] = {}
    values: dict[str, str] = {}
    image: Image | None = None
    stage = ""
    for step in read(path):
        given = {**(image.environment if image else {}), **values}
        match step.name:
            case "ARG":
                key, _, default = step.value.partition("=")
                values[key] = arguments.get(key) or (filled(default, given) if default else defaults[key])
                if image is None:
                    defaults[key] = values[key]
            case "FROM":
                base, _, stage = filled(step.value, defaults).partition(" AS ")
                image = stages[base] if base in stages else Image((_debian(base),))
                values = {}
            case "RUN":
                assert image
                image = _with_layer(image, _run_key(step, values), _running(step.value, image, values, mounts or {}))
            case "COPY" if step.flag("from"):
                assert image
                source = stages[step.flag("from")]
                image = _with_layer(image, f"{step} {source.layers[-1].name}", _copying(step, source))
            case "COPY":
                assert image
                taken = sources(replace(step, value=filled(step.value, given)), files)
                assert taken, f"{step} copies nothing"
                image = _with_layer(image, f"{step} {image.folder} {_digest(taken)}", _placing(taken, image.folder))
            case _:
                assert image
                image = _configured(image, step, given)
        if image and stage:
            stages[stage] = image
    assert image
    return image


def _configured(image: Image, step: Instruction, given: Mapping[str, str]) -> Image:
    match step.name:
        case "ENV":
            name, _, value = filled(step.value, given).partition("=")
            return replace(image, environment={**image.environment, name: value})
        case "WORKDIR":
            return replace(image, folder=step.value)
        case "USER":
            return replace(image, user=int(step.value))
        case "ENTRYPOINT":
            return replace(image, entry_point=tuple(json.loads(step.value)), command=())
        case "CMD":
            return replace(image, command=tuple(json.loads(step.value)))
    raise ValueError(f"{step.name}: this instruction is not known here")


def _debian(base: str) -> Path:
    assert base == _BASE, f"{base}: only {_BASE} can be made here"
    folder = STORE / "layers" / hashlib.sha256(" ".join(_DEBIAN).encode()).hexdigest()[:16]
    if not folder.exists():
        made = folder.with_suffix(".new")
        made.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(made, ignore_errors=True)
        done = subprocess.run([*_DEBIAN, str(made)], capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, f"{base}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        (made / "etc/resolv.conf").write_text("")
        for each in made.glob("etc/apt/apt.conf.d/99mmdebstrap"):
            each.unlink()
        (made / "etc/apt/apt.conf.d/docker-clean").write_text(_APT)
        made.rename(folder)
    return folder


def _run_key(step: Instruction, values: Mapping[str, str]) -> str:
    return f"{step} {sorted(values.items())}"


def _with_layer(image: Image, key: str, script: Sequence[str]) -> Image:
    """Return an image with one more layer, made by a script, which finds the root at $ROOT and the layer at $LAYER."""
    digest = hashlib.sha256(f"{image.layers[-1].name} {image.folder} {key}".encode()).hexdigest()[:16]
    layer = STORE / "layers" / digest
    if not layer.exists():
        made = layer.with_suffix(".new")
        shutil.rmtree(made, ignore_errors=True)
        for part in ("upper", "work", "root", "other"):
            (made / part).mkdir(parents=True)
        lines = [_overlay(made / "root", image.layers, made), *script]
        known = {**os.environ, "ROOT": str(made / "root"), "LAYER": str(made / "upper"), "OTHER": str(made / "other")}
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-euc", "\n".join(lines)]
        done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=3000)
        assert done.returncode == 0, f"{key}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        (made / "upper").rename(layer)
        shutil.rmtree(made)
    return replace(image, layers=(*image.layers, layer))


def _overlay(root: Path, layers: Sequence[Path], writable: Path | None = None) -> str:
    lower = ":".join(str(layer) for layer in reversed(layers))
    upper = f",upperdir={writable / 'upper'},workdir={writable / 'work'}" if writable else ""
    return f"mount -t overlay overlay -o lowerdir={lower}{upper} {root}"


def _devices(root: Path) -> list[str]:
    return [
        f"mount --bind /etc/resolv.conf {root}/etc/resolv.conf",
        f"mount --rbind /proc {root}/proc",
        f"mount --rbind /dev {root}/dev",
    ]


def _running(command: str, image: Image, values: Mapping[str, str], mounts: Mapping[str, Path]) -> list[str]:
    """Return the script of RUN. The host's certificates are lent to pip, since a host may have its own registry."""
    variables = {**image.environment, **values, "HOME": "/root"}
    lent = {**mounts, "/run/host": _CERTIFICATES.parent} if _CERTIFICATES.exists() else mounts
    if _CERTIFICATES.exists():
        variables["PIP_CERT"] = f"/run/host/{_CERTIFICATES.name}"
    script = ["mount -t tmpfs tmpfs $ROOT/run", *_devices(Path("$ROOT"))]
    script += [
        f"mkdir -p $ROOT{place}; mount --bind {shlex.quote(str(folder))} $ROOT{place}" for place, folder in lent.items()
    ]
    given = [f"{name}={value}" for name, value in variables.items()]
    inside = ["env", "-i", "-C", image.folder, *given, "/bin/sh", "-c", command]
    return [*script, f"exec chroot $ROOT {shlex.join(inside)}"]


def _copying(step: Instruction, source: Image) -> list[str]:
    place, target = step.words()
    return [
        _overlay(Path("$OTHER"), source.layers),
        f"mkdir -p $LAYER{target}",
        f"cp --archive $OTHER{place}/. $LAYER{target}/",
    ]


def _placing(taken: Mapping[str, str], folder: str) -> list[str]:
    script = [f"cd {shlex.quote(str(ROOT))}"]
    for source, target in taken.items():
        whole = shlex.quote(os.path.normpath(os.path.join(folder, target)))
        script.append(
            f"install -D --mode={os.stat(ROOT / source).st_mode & 0o777:o} {shlex.quote(source)} $LAYER{whole}"
        )
    return script


def _digest(taken: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for source, target in sorted(taken.items()):
        digest.update(f"{source} {target} ".encode() + (ROOT / source).read_bytes())
    return digest.hexdigest()
