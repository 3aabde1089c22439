"""The operators of the extension as csrc/ registers them, read from its sources: without nvcc nothing else knows them."""

import re

from gbmoe import extension


def schemas() -> dict[str, str]:
    """The schema of each operator, its name first, by name."""
    found = {}
    for source in sorted([*extension.source_folder().rglob("*.cu"), *extension.source_folder().rglob("*.cpp")]):
        for name, literals in re.findall(r'^GBMOE_OPERATOR\w*\(\s*(\w+),((?:\s*"[^"]*")+)\);', source.read_text(), re.MULTILINE):
            assert name not in found, f"{name} is registered twice"
            found[name] = name + "".join(re.findall(r'"([^"]*)"', literals))
    return found


def fields(file: str, struct: str) -> list[str]:
    """The names of a struct's fields in a file of csrc/, in their order."""
    body = re.search(rf"^struct {struct} {{\n(.*?)(?:^}};|^\n)", (extension.source_folder() / file).read_text(), re.MULTILINE | re.DOTALL)
    assert body is not None, f"csrc/{file} has no struct {struct}"
    declarations = re.findall(r"^  (?:int64_t|double|bool|float|int) ([^;(]*);", body.group(1), re.MULTILINE)
    return [name.split("=")[0].strip() for declaration in declarations for name in declaration.split(",")]
