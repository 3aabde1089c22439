"""Alter one node of a JSON file in every way that may break a reader."""

import json
from collections.abc import Iterator

# The bytes that replace a node: wrong types, NaN and numbers that are too large, texts with a meaning for terminals, TeX, paths or
# format strings, and bytes that are not JSON.
REPLACEMENTS = (
    b"null", b"true", b"-1", b"0", b"1", b"1.5", b"-2.5", b"1e-320", b"1e308", b"1e999", b"NaN", b"Infinity", b"-Infinity",
    b"18446744073709551616", b"1" + 400 * b"0", b"1" + 5000 * b"0", b'""', b'"x"', b'"a\\nb\\u001b[2J"', b'"$\\\\frac$ 100% {0}"',
    b'"../../x"', b'"\\ud800"', b'"' + 3000 * b"x" + b'"', b"[]", b"[null]", b'[["x"]]', b"[-1, 0]", b"{}", b'{"median": null}',
    30 * b"[" + 30 * b"]", 900 * b"[" + 900 * b"]", 20_000 * b'{"a":', b"", b'"\xff"',
)
_PLACE = "the place of what is altered"


def paths(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The path of every node below `value`, outer nodes first."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from paths(inner, (*path, key))


def altered(value: object, path: tuple) -> Iterator[tuple[str, bytes]]:
    """Yield (what was altered, the file) with the node at `path` missing, repeated, and replaced by each of REPLACEMENTS."""
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
    """Replace the node at `path` by `node`."""
    get(value, path[:-1])[path[-1]] = node
