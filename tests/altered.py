"""JSON with one node altered in every way that a reader may trip over."""

import json
from collections.abc import Iterator

# As they stand in the file: wrong types, numbers that are none or do not fit, texts that mean something to somebody else, and
# what is no JSON at all.
REPLACEMENTS = (
    b"null", b"true", b"-1", b"0", b"1", b"1.5", b"-2.5", b"1e-320", b"1e308", b"1e999", b"NaN", b"Infinity", b"-Infinity",
    b"18446744073709551616", b"1" + 400 * b"0", b"1" + 5000 * b"0", b'""', b'"x"', b'"a\\nb\\u001b[2J"', b'"$\\\\frac$ 100% {0}"',
    b'"../../x"', b'"\\ud800"', b'"' + 3000 * b"x" + b'"', b"[]", b"[null]", b'[["x"]]', b"[-1, 0]", b"{}", b'{"median": null}',
    30 * b"[" + 30 * b"]", 900 * b"[" + 900 * b"]", 20_000 * b'{"a":', b"", b'"\xff"',
)
_PLACE = "the place of what is altered"


def paths(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Of every node below `value`, outer ones first."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from paths(inner, (*path, key))


def altered(value: object, path: tuple) -> Iterator[tuple[str, bytes]]:
    """(what was done, the file) with that node missing, twice there, and replaced by each of REPLACEMENTS."""
    for what in ("missing", "twice"):
        copy = json.loads(json.dumps(value))
        parent = get(copy, path[:-1])
        if what == "missing":
            del parent[path[-1]]
        elif isinstance(parent, list):
            parent.append(parent[path[-1]])
        else:
            parent[f"{path[-1]}2"] = parent[path[-1]]
        yield what, json.dumps(copy).encode()
    copy = json.loads(json.dumps(value))
    put(copy, path, _PLACE)
    before, after = json.dumps(copy).encode().split(json.dumps(_PLACE).encode())
    for replacement in REPLACEMENTS:
        yield replacement[:40].decode(errors="replace"), before + replacement + after


def get(value: object, path: tuple) -> object:
    """The node at `path`."""
    for key in path:
        value = value[key]
    return value


def put(value: object, path: tuple, node: object) -> None:
    """Put `node` in the place of the one at `path`."""
    get(value, path[:-1])[path[-1]] = node
