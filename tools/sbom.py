"""Writes each image's bill of materials: CycloneDX 1.6 (JSON) in deploy/sbom.

    make sbom

Each package in a lock file is a component with version, hash, licence and requirements. Names and licences come from
the packages' metadata. Debian packages are not listed, because /var/lib/dpkg/status in the image has them.
"""

import argparse
import json
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from tools.dist import read_project
from tools.lock import DEPLOY, IMAGES, ROOT, TORCH_WHEELS, lock_of, lock_text, locked, name_of, report

SBOM = DEPLOY / "sbom"
KNOWN = {"cuda-toolkit": "LicenseRef-NVIDIA-Proprietary"}
"""Licences of packages whose metadata has none."""


def licence_of(metadata: Mapping[str, Any]) -> str:
    """Return the licence from a package's metadata: an SPDX expression, or the authors' name for it."""
    if expression := metadata.get("license_expression"):
        return str(expression)
    classifiers = [each for each in metadata.get("classifier", []) if each.startswith("License ::")]
    names = [each.rpartition(" :: ")[2] for each in classifiers if not each.endswith("OSI Approved")]
    text = str(metadata.get("license") or "").strip()
    if text and "\n" not in text and len(text) < 60:
        return text
    return " OR ".join(names) or KNOWN.get(metadata["name"], "")


def component(found: Mapping[str, Any], licences: LicenseFactory) -> Component:
    """Return the component of a package in pip's report."""
    name, version = name_of(dict(found)), found["metadata"]["version"]
    hashed = found["download_info"]["archive_info"]["hashes"]["sha256"]
    url = PackageURL("pypi", None, name, version)
    return Component(
        type=ComponentType.LIBRARY, name=name, version=version, purl=url, bom_ref=str(url),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=hashed)],
        licenses=[licences.make_from_string(licence_of(found["metadata"]))],
        description=found["metadata"].get("summary"),
    )  # fmt: skip


def needs(found: Mapping[str, Any]) -> set[str]:
    """Return the names of what a package requires, extras apart."""
    required = [each for each in found["metadata"].get("requires_dist", []) if "extra ==" not in each]
    return {re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", each)[0]).lower() for each in required}


def bill(image: str, found: Sequence[Mapping[str, Any]]) -> str:
    """Return an image's bill of materials as JSON. The same lock file always gives the same text."""
    project = read_project(ROOT)
    licences = LicenseFactory()
    ours = Component(
        type=ComponentType.CONTAINER, name=f"quire-{image}", version=project["version"], bom_ref=f"quire-{image}",
        licenses=[licences.make_from_string(project["license"])],
    )  # fmt: skip
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, lock_of(image).read_text("utf-8")))
    bom.metadata.component = ours
    bom.metadata.properties.add(Property(name="quire:lock", value=str(lock_of(image).relative_to(ROOT))))
    parts = {name_of(dict(each)): component(each, licences) for each in found}
    for each in found:
        name = name_of(dict(each))
        bom.components.add(parts[name])
        bom.register_dependency(parts[name], [parts[need] for need in needs(each) if need in parts])
    bom.register_dependency(ours, parts.values())
    made = json.loads(JsonV1Dot6(bom).output_as_string())
    del made["metadata"]["timestamp"]
    return json.dumps(made, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.sbom", description="Write the bills of materials.")
    parser.add_argument("--torch-wheels", default=TORCH_WHEELS, help="page or folder with torch for CPUs")
    options = parser.parse_args(arguments)
    SBOM.mkdir(exist_ok=True)
    for image in IMAGES:
        exact = [f"{name}==={version}" for name, version in locked(image).items()]
        found = report(image, exact, options.torch_wheels, "--no-deps")
        if lock_text(found) != lock_of(image).read_text("utf-8"):
            print(
                f"{lock_of(image).name}: an index has other files than the lock file; run make locks", file=sys.stderr
            )
            return 1
        if nameless := [name_of(each) for each in found if not licence_of(each["metadata"])]:
            print(
                f"no licence in the metadata of {', '.join(nameless)}; add it to KNOWN in tools/sbom.py",
                file=sys.stderr,
            )
            return 1
        (SBOM / f"quire-{image}.cdx.json").write_text(bill(image, found), "utf-8")
        print(f"deploy/sbom/quire-{image}.cdx.json: {len(found)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
