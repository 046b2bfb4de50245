"""Snapshot: the state of a core as JSON, from which an equal core can be created.

The state is a graph of plain values and of objects of the core's own classes. Every object is written once and
referenced by number, so that shared objects stay shared. Loading instantiates only classes of the core without running
their code, so an untrusted file is harmless. A snapshot is compatible only with the code that wrote it.

If token ids are not recorded, everything derived from text is replaced as in the record: token ids and opaque bytes by
zeros, and secrets by tags. Bytes of unknown meaning become zeros.
"""

import array
import base64
import enum
import importlib
import json
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from scheduler_svc.core.memory.partial_blocks import PartialBlocks
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recorder.tags import Tagger, fit
from shared.prefix_keys import KEY_BYTES
from shared.request_spec import RequestSpec

_PACKAGES = ("scheduler_svc.core.", "shared.request_spec")
_DENSE = 1 << 16
"""Arrays with more elements are stored sparsely."""
_MAX_STATE = 1 << 31
_LISTS: dict[str, Any] = {"list": list, "set": set, "deque": deque}
_DICTS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter, "default": dict}

_PEERS = {
    ("RequestKey", ""),
    ("Frontends", "numbers"),
    ("Frontends", "_peers"),
    ("Fleet", "_workers"),
    ("Worker", "peer"),
    ("RequestEnded", "frontend"),
}
_ROW_NUMBERS = {("SteadyRows", "column")}
_KEYS = {
    ("HostKeys", "_blocks"), ("HostKeys", "_keys"), ("HostKeys", "_roots"),
    ("HostKeys", "_previous"), ("HostKeys", "_num_after"), ("HostStates", "_cached"),
    ("BlockEntry", ""), ("DiskBlock", ""), ("DiskSpace", "_unwritten"), ("DiskSpace", "_writing"),
    ("DiskSpace", "_reading"), ("DiskSpace", "_awaited"), ("_Node", "root"),
    ("_Node", "keys"), ("_Node", "children"), ("PrefixCache", "_next_keys"), ("PrefixCache", "_pending"),
    ("Request", "keys"), ("PartialBlocks", ""), ("PartialBlocks", "_followers"),
    ("Backlog", "_prefixes"), ("OutputLengths", "_samples"), ("OutputLengths", "_sorted"), ("_Wanted", ""),
    ("Sessions", "_kinds"), ("Sessions", "_stems"), ("Sessions", "_tails"), ("_Session", "stem"),
    ("_Session", "tail"),
}  # fmt: skip
_KEY_CLASSES = {"PrefixDirectory"}
_GRAMMARS = {("Request", "grammar_key")}
_GRAMMAR_CLASSES = {"Grammars", "Backlog", "Holding", "_Group", "_GrammarTurns", "RequestRegistry"}
_TEXTS = {"text", "reason", "message"}
"""Operator texts that may quote a request."""
_IDENTITIES = {
    ("IdentifiedRequests", "_live"), ("KeptLogs", "_logs"), ("Sessions", "_named"), ("_Session", "name"),
    ("Sessions", "_branches"), ("_Session", "branch_of"),
}  # fmt: skip
"""Bytes by (class, field) of the object that holds them, directly or in containers."""


class SnapshotError(ValueError):
    """A snapshot cannot be made or used."""


def dump(core: Scheduler, tagger: Tagger, *, with_tokens: bool) -> bytes:
    """Return the state of a core.

    Raises:
        SnapshotError: the state holds a value of an unknown kind.
    """
    for worker in core._fleet:
        worker.rows.catch_up()
    return zlib.compress(json.dumps(_Writer(tagger, with_tokens).write(core), separators=(",", ":")).encode(), 3)


def load(data: bytes, facts: TokenFacts) -> Scheduler:
    """Return a core with the state of a snapshot. The core uses `facts` for information about tokens.

    Raises:
        SnapshotError: the snapshot is incompatible with this code.
    """
    try:
        core = _Reader(json.loads(zlib.decompressobj().decompress(data, _MAX_STATE)), facts).read()
    except (zlib.error, ValueError, TypeError, KeyError, IndexError, AttributeError, ImportError) as error:
        raise SnapshotError(
            f"snapshot: incompatible with this release ({error!r}); use the one that wrote it"
        ) from None
    if not isinstance(core, Scheduler):
        raise SnapshotError("snapshot: not the state of a scheduler; use another segment")
    return core


class _Writer:
    def __init__(self, tagger: Tagger, with_tokens: bool) -> None:
        self._tagger = tagger
        self._with_tokens = with_tokens
        self._numbers: dict[int, int] = {}
        self._found: list[tuple[Any, tuple[str, str]]] = []
        """Objects ordered by number, with the class and field that hold them. The list keeps the objects alive."""

    def write(self, core: Scheduler) -> list[Any]:
        nodes = []
        if not self._with_tokens:
            # The thread may not have seen the newest arrivals, and computing a grammar key's tag needs its size.
            for spec in _specs(core):
                self._tagger.grammar_tag(spec.grammar)
        self._value(core, ("", ""))
        position = 0
        while position < len(self._found):
            nodes.append(self._node(*self._found[position]))
            position += 1
        return nodes

    def _value(self, value: Any, place: tuple[str, str]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is bytes:
            return {"b": base64.b64encode(value if self._with_tokens else self._hide(value, place)).decode()}
        if isinstance(value, np.generic):
            return {"n": [str(value.dtype), value.item()]}
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._found)
            self._found.append((value, place))
        return [number]

    def _node(self, value: Any, place: tuple[str, str]) -> list[Any]:
        kind = type(value)
        hides = not self._with_tokens
        if isinstance(value, TokenFacts):
            return ["facts"]
        if isinstance(value, enum.Enum):
            return ["enum", _name(kind), value.name]
        if isinstance(value, np.ndarray):
            return _array(_hidden_array(value, place) if hides else value)
        if kind is array.array:
            shown = array.array(value.typecode, bytes(len(value) * value.itemsize)) if hides else value
            return ["array", value.typecode, base64.b64encode(shown.tobytes()).decode()]
        if isinstance(value, RequestSpec) and hides:
            value = self._hidden_spec(value)
            return ["named", _name(kind), *[_plain(each) for each in value]]
        if isinstance(value, tuple) and kind is not tuple:
            # `_fields` lists the names in the order of the values.
            return ["named", _name(kind), *[self._value(each, (kind.__name__, "")) for each in value]]
        if kind in (tuple, frozenset):
            if hides and (place == ("Request", "stop_token_ids") or place == ("RowTable", "_many_stops")):
                value = (0,) * len(value)
            if place == ("PartialBlocks", "_entries"):
                return ["tuple", self._value(value[0], ("PartialBlocks", "")), self._value(value[1], ("", ""))]
            if place == ("PartialBlocks", "_followers"):
                place = ("", "")
            elif place in (("Holding", "_groups"), ("_Group", "key")):
                place = ("PartialBlocks", "")
            return [kind.__name__, *[self._value(each, place) for each in value]]
        for name, container in _LISTS.items():
            if kind is container:
                return [name, value.maxlen if kind is deque else None, *[self._value(each, place) for each in value]]
        if isinstance(value, dict):
            names: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter", defaultdict: "default"}
            flat = [self._value(each, place) for pair in value.items() for each in pair]
            return [names[kind], *flat]
        if isinstance(value, MethodType):
            return ["method", self._value(value.__self__, place), value.__name__]
        if isinstance(value, FunctionType):
            return ["function", _name(value)]
        return ["object", *self._object(value, kind)]

    def _object(self, value: Any, kind: type) -> list[Any]:
        if isinstance(value, Scheduler):
            kind = Scheduler
        names = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
        # Skip methods that a simulation replaced on an object, because they are not state.
        names += [name for name in getattr(value, "__dict__", {}) if not callable(getattr(kind, name, None))]
        found: list[Any] = [_name(kind)]
        for name in names:
            if name.startswith("_tape") or not hasattr(value, name):
                continue
            if name == "highest_token" and not self._with_tokens:
                found += [name, 0]
            elif name in _TEXTS and not self._with_tokens and isinstance(getattr(value, name), str):
                found += [name, ""]
            else:
                found += [name, self._value(getattr(value, name), (kind.__name__, name))]
        return found

    def _hide(self, value: bytes, place: tuple[str, str]) -> bytes:
        if place in _PEERS or place in _ROW_NUMBERS or not value:
            return value
        if place in _KEYS or place[0] in _KEY_CLASSES:
            parts = (value[at : at + KEY_BYTES] for at in range(0, len(value), KEY_BYTES))
            return b"".join([fit(self._tagger.tag(part), KEY_BYTES) for part in parts])
        if place in _GRAMMARS or place[0] in _GRAMMAR_CLASSES:
            return self._tagger.grammar_key(value)
        if place in _IDENTITIES:
            return self._tagger.tag(value)
        return bytes(len(value))

    def _hidden_spec(self, spec: RequestSpec) -> RequestSpec:
        return spec._replace(
            stop_token_ids=bytes(len(spec.stop_token_ids)),
            sampling=bytes(len(spec.sampling)),
            grammar=fit(self._tagger.grammar_tag(spec.grammar), len(spec.grammar)),
            cache_scope=self._tagger.tag(spec.cache_scope),
            session=self._tagger.tag(spec.session),
            identity=self._tagger.tag(spec.identity),
            resume_info=bytes(len(spec.resume_info)),
        )


def _specs(core: Scheduler) -> list[RequestSpec]:
    """Return the specs of all live requests and kept logs."""
    requests = core._requests
    logs = requests.identified._kept._logs.values()
    return [request.spec for request in requests] + [log.spec for _, log in logs]


def _plain(value: Any) -> Any:
    return {"b": base64.b64encode(value).decode()} if isinstance(value, bytes) else _scalar(value)


def _scalar(value: Any) -> Any:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _hidden_array(value: Any, place: tuple[str, str]) -> Any:
    if place == ("RowTable", "_recent"):
        return np.zeros_like(value)
    if place in (("RowTable", "_stops"), ("SteadyRows", "stops")):
        return np.minimum(value, 0)
    return value


def _array(value: Any) -> list[Any]:
    shape, dtype = list(value.shape), value.dtype.str
    if value.size <= _DENSE:
        return ["dense", dtype, shape, base64.b64encode(value.tobytes()).decode()]
    flat = value.reshape(-1)
    places = np.flatnonzero(flat)
    data = (base64.b64encode(each.tobytes()).decode() for each in (places.astype("<i8"), flat[places]))
    return ["sparse", dtype, shape, *data]


def _name(thing: Any) -> str:
    name = f"{thing.__module__}:{thing.__qualname__}"
    if not name.startswith(_PACKAGES) or "<" in name:
        raise SnapshotError(f"snapshot: the core holds {name}, which cannot be written; please report this")
    return name


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    if not name.startswith(_PACKAGES) or "." in path.replace("_", ""):
        raise SnapshotError(f"snapshot: {name} is not part of the core; use another segment")
    return getattr(importlib.import_module(module), path)


class _Reader:
    def __init__(self, nodes: list[Any], facts: TokenFacts) -> None:
        self._nodes = nodes
        self._facts = facts
        self._made: list[Any] = [None] * len(nodes)
        self._is_made = [False] * len(nodes)

    def read(self) -> Any:
        # First create all mutable objects empty, then fill them, because contents may refer to each other.
        for number, node in enumerate(self._nodes):
            kind = node[0]
            if kind in _LISTS:
                self._put(number, deque(maxlen=node[1]) if kind == "deque" else _LISTS[kind]())
            elif kind in _DICTS:
                self._put(number, _DICTS[kind]())
            elif kind == "object":
                cls = _find(node[1])
                self._put(number, object.__new__(cls))
        for number, node in enumerate(self._nodes):
            made = self._get(number)
            kind = node[0]
            if kind in _LISTS:
                add = made.add if kind == "set" else made.append
                for each in node[2:]:
                    add(self._value(each))
            elif kind in _DICTS:
                for at in range(1, len(node), 2):
                    made[self._value(node[at])] = self._value(node[at + 1])
            elif kind == "object":
                for at in range(2, len(node), 2):
                    object.__setattr__(made, node[at], self._value(node[at + 1]))
        for made in self._made:
            if isinstance(made, PartialBlocks):
                # In the order of their tokens, which are all zero now.
                for followers in made._followers.values():
                    followers.sort()
        return self._get(0)

    def _put(self, number: int, value: Any) -> None:
        self._made[number], self._is_made[number] = value, True

    def _get(self, number: int) -> Any:
        if not self._is_made[number]:
            self._put(number, self._make(self._nodes[number]))
        return self._made[number]

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return self._get(value[0])
        if isinstance(value, dict):
            if "b" in value:
                return base64.b64decode(value["b"])
            return np.dtype(value["n"][0]).type(value["n"][1])
        return value

    def _make(self, node: list[Any]) -> Any:
        kind = node[0]
        if kind == "facts":
            return self._facts
        if kind == "enum":
            return _find(node[1])[node[2]]
        if kind == "named":
            return _find(node[1])._make([self._value(each) for each in node[2:]])
        if kind == "tuple":
            return tuple([self._value(each) for each in node[1:]])
        if kind == "frozenset":
            return frozenset([self._value(each) for each in node[1:]])
        if kind == "array":
            return array.array(node[1], base64.b64decode(node[2]))
        if kind == "dense":
            return np.frombuffer(base64.b64decode(node[3]), node[1]).reshape(node[2]).copy()
        if kind == "sparse":
            made = np.zeros(node[2], node[1])
            places = np.frombuffer(base64.b64decode(node[3]), "<i8")
            made.reshape(-1)[places] = np.frombuffer(base64.b64decode(node[4]), node[1])
            return made
        if kind == "method":
            return getattr(self._value(node[1]), node[2])
        if kind == "function":
            return _find(node[1])
        raise SnapshotError(f"snapshot: unknown kind {kind!r}; use the release that wrote it")
