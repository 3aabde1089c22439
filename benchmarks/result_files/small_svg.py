"""matplotlib's SVG in a third of its bytes, which shows the same: pictures are kept in the repository.

Lengths have two decimals of a point. A style that several elements have is a class, an id that nothing refers to is left out, and so
are groups without attributes and the space between elements.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from xml.etree import ElementTree

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", _XLINK)


def small_svg(text: str) -> str:
    """The picture that is in `text`, the text of an SVG file."""
    root = ElementTree.fromstring(text)
    used = set(re.findall(r"#([\w-]+)", " ".join(value for element in root.iter() for value in element.attrib.values())))
    for element in root.iter():
        if element.get("id") not in used:
            element.attrib.pop("id", None)
        for name, value in element.attrib.items():
            element.set(name, value.replace("\n", "") if value.startswith("data:") else _shorter(value))
        if element.get("transform", "").startswith("rotate(0 "):
            del element.attrib["transform"]
        if not (element.text or "").strip():
            element.text = None
        element.tail = None
    _unwrap(root)
    counts = Counter(element.get("style", "") for element in root.iter())
    names = {style: f"s{i}" for i, (style, count) in enumerate(counts.items()) if style and count > 1}
    for element in root.iter():
        if element.get("style") in names:
            element.set("class", names[element.attrib.pop("style")])
    style = root.find(f".//{{{_SVG}}}style")
    assert style is not None  # matplotlib writes one
    style.text = (style.text or "") + "".join(f".{name}{{{text}}}" for text, name in names.items())
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _shorter(value: str) -> str:
    """The value of an attribute with two decimals and without the space that means nothing."""
    value = re.sub(r"-?\d+\.\d{3,}", lambda number: f"{round(float(number[0]), 2) + 0.0}".removesuffix(".0"), value)
    return re.sub(r"\s*\n\s*", " ", value.strip()).replace("; ", ";").replace(": ", ":").replace("(-0 ", "(0 ")


def _unwrap(element: ElementTree.Element) -> None:
    """Put the children of groups without attributes in the groups' places."""
    for child in element:
        _unwrap(child)
    element[:] = list(_flat(element))


def _flat(element: ElementTree.Element) -> Iterator[ElementTree.Element]:
    for child in element:
        if child.tag == f"{{{_SVG}}}g" and not child.attrib:
            yield from child
        else:
            yield child
