"""The rows of result files as Markdown: the machine, a main table for each kind of measurement, pictures, and every row.

The main table has a line for each shape and routing, and a column for each implementation: the rate of forward and, where it was
measured, of forward with backward. A word stands in the place of a missing rate; the reasons follow the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from benchmarks.result_files import reading
from gbmoe.cli.bench import table
from gbmoe.cli.bench.measurements.measurement import FORWARD, GRAPH, IN_MICROSECONDS, TRAINING
from gbmoe.cli.bench.result_file import SPREAD_AT_MOST, is_disturbed, timing_of
from gbmoe.cli.bench.running.verify_and_time import SUSTAINED

# The computations that share a cell in the main table, in this order.
_TOGETHER = (FORWARD, TRAINING, GRAPH)


def page(contents: Sequence[dict], pictures: Sequence[str], problems: Sequence[str], every_row: bool = True) -> str:
    """The whole page: the files that could be read, and a line for each that could not. Without `every_row` it ends each suite with the
    main tables and pictures."""
    parts = ["# Benchmarks",
             "Every figure is of a result that was verified against float64 first. Those of one suite are timed in one way, which its"
             " section names: in bursts, or sustained. Figures of the two are not compared."]
    parts += [f"**Missing:** {problem}" for problem in problems]
    for content in contents:
        parts += [f"## {content['suite']}", *_conditions(content), *_missing(content), *_main_tables(content), *_failures(content),
                  *_images(_of_suite(pictures, content)), *(_all_rows(content) if every_row else ())]
    return "\n\n".join(parts) + "\n"


def main_table(content: dict) -> str:
    """The part of a page that a README shows: where it was measured, and the first main table."""
    return "\n\n".join([*_conditions(content)[:1], *_main_tables(content, short=True)[:2]])


def main_pictures(content: dict, pictures: Sequence[str]) -> str:
    """The pictures that a README shows, at most two: a heat map of speed-ups, and bars."""
    # Those with backward come first, because training costs that much.
    ranked = sorted(_of_suite(pictures, content), key=lambda name: ("-and-backward" not in name, name))
    chosen = [name for ending in ("-speedup", "-speed")
              for name in [name for name in ranked if PurePosixPath(name).stem.endswith(ending)][:1]]
    return "\n\n".join(_images(chosen))


def _of_suite(pictures: Sequence[str], content: dict) -> list[str]:
    return [picture for picture in pictures if PurePosixPath(picture).name.startswith(f"{content['suite']}-")]


def _images(pictures) -> list[str]:
    return [f"![{PurePosixPath(picture).stem.replace('-', ' ')}]({picture})" for picture in pictures]


# ----------------------------------------------------------------------------------------------------------- conditions


def _conditions(content: dict) -> list[str]:
    """A sentence for each machine and software that runs were made with, then the rivals and engines that were left out."""
    commits: dict[tuple[str, str], dict[str, None]] = {}
    notes: list[str] = []
    for run in content["runs"]:
        machine, versions = run["machine"], run["versions"]
        commit = (versions["commit"] or "unknown")[:12] + (" with changes" if versions["dirty"] else "")
        ranks = f", {run['ranks']} ranks, figures of one" if run.get("ranks") else ""
        driver = f", driver {machine['driver']}" if machine.get("driver") else ""
        software = f"torch {versions['torch']}, gbmoe {versions['gbmoe']}"
        kind = f"{machine['name']}{driver}, {software}", f"{run['dtype']}{ranks}, seed {run['seed']}"
        commits.setdefault(kind, {})[commit] = None
        notes += [f"- {name}: {about}" for name, about in run["peers"].items()]
        notes += [f"- energy is left out: {run['energy_left_out']}"] if run.get("energy_left_out") else []
        notes += [f"- {name} is left out: {reason}" for what in ("engines", "peers")
                  for name, reason in run[f"{what}_left_out"].items()]
    sentences = [f"{where} at commit{'s' if len(of) > 1 else ''} {', '.join(of)}, {how}." for (where, how), of in commits.items()]
    known = [run["limits"] for run in content["runs"] if run["limits"]["flops"] and run["limits"]["bytes"]]
    if known:
        flops, copied = (_span([limits[what] / 1e12 for limits in known]) for what in ("flops", "bytes"))
        bursts = reading.timing(content) == SUSTAINED and any(
            timing_of(row) != SUSTAINED for run in content["runs"] for row in run["limit_rows"])
        sentences.append(f"Limits{', timed in bursts' if bursts else ''}: a dense product of {flops} TFLOP/s, a copy of {copied} TB/s.")
    sentences.append(_timed(content))
    return [" ".join(sentences), *(["\n".join(dict.fromkeys(notes))] if notes else [])]


def _span(numbers: list[float]) -> str:
    """The least and the greatest number, as one where they look alike: each row is compared with the limits of its own run."""
    least, greatest = f"{min(numbers):.3g}", f"{max(numbers):.3g}"
    return least if least == greatest else f"{least} to {greatest}"


def _timed(content: dict) -> str:
    ways = list(dict.fromkeys(run["sustained"] for run in content["runs"] if run.get("sustained")))
    if reading.timing(content) != SUSTAINED:
        return "Timed in bursts: medians of calls apart, each with a cold L2 cache."
    return f"Timed sustained, one after the other: {'; '.join(ways) or 'for how long is not said'}."


def _missing(content: dict) -> list[str]:
    names = reading.missing(content)
    return [f"**Not run:** {len(names)} of {len(content['configurations'])} configurations: {', '.join(names)}."] if names else []


# --------------------------------------------------------------------------------------------------------------- tables


def _table(columns: Sequence[tuple[str, str]], lines: Sequence[Sequence[str]]) -> str:
    def line(cells):
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    rule = "|" + "|".join("---" if align == "<" else "---:" for _, align in columns) + "|"
    return "\n".join([line([heading for heading, _ in columns]), rule, *map(line, lines)])


def _main_tables(content: dict, short: bool = False) -> list[str]:
    """A heading and a table for each kind of measurement that has rates. A short table omits the engines that `auto` chooses from, and
    implementations without any time."""
    parts = []
    for kind, rows in table.by_kind(reading.without_cap(table.measured(content))).items():
        if not any(row.get("median") for row in rows):
            continue
        names = list(dict.fromkeys(row["by"] for row in rows))
        if short:
            names = [name for name in names if any(row["by"] == name and row.get("median") for row in rows)
                     and (not name.startswith("gbmoe-") or name in ("gbmoe-auto", content["baseline"]))]
        shared = [computation for computation in _TOGETHER if any(_shares_a_cell(row, computation) for row in rows)]
        columns = [("shape", "<"), ("routing", "<"), ("computation", "<"), *((name, ">") for name in names)]
        lines = [[*line, *_cells(together, names)] for line, together in _lines(rows).items()]
        if not any(step for _, _, step in _lines(rows)):
            columns, lines = columns[:2] + columns[3:], [line[:2] + line[3:] for line in lines]
        doubt = _doubt(content) if any("?" in cell for line in lines for cell in line) else ""
        parts += [_heading(kind, shared) + doubt, _table(columns, lines)]
    return parts


def _shares_a_cell(row: dict, computation: str) -> bool:
    return row["kind"] == "layer" and row["computation"] == computation


def _heading(kind: str, shared: Sequence[str]) -> str:
    measure = "Microseconds" if kind in IN_MICROSECONDS else "TFLOP/s"
    what = {"layer": "One whole layer, router included", "product": "One grouped GEMM",
            "permutation": "Permutation", "link": "One trip over the links", "host": "The host's work for one whole layer",
            "host-parts": "The host's work of which the file has the parts"}[kind]
    fastest = f": {' / '.join(shared)}. The fastest {shared[-1]}" if shared else ". The fastest"
    return f"{what}. {measure}{fastest} of each line is bold."


def _doubt(content: dict) -> str:
    spread = SPREAD_AT_MOST[reading.timing(content)]
    return (f" A figure with ? was disturbed: its quartiles lie more than {100 * spread:.0f} % of the median apart. Where that is so of the"
            " fastest one or of the next, none is bold.")


def _lines(rows: Sequence[dict]) -> dict[tuple[str, str, str], list[dict]]:
    """The rows of each line of the table. Its key is the shape, the routing, and the computation where that has a line of its own."""
    lines: dict[tuple[str, str, str], list[dict]] = {}
    for row in rows:
        shared = any(_shares_a_cell(row, computation) for computation in _TOGETHER)
        step = "" if shared else row["computation"] + (f", align {row['align']}" if row.get("align") else "")
        lines.setdefault((_shape(row), row["routing"], step), []).append(row)
    return lines


def _cells(together: Sequence[dict], names: Sequence[str]) -> list[str]:
    """A line's cells. The fastest one, by the last computation that has a time, is bold, unless it or the next one was disturbed: then
    the line does not tell which is faster, or by how much."""
    timed = [row for row in together if row.get("median") and row["by"] in names]
    ranked = sorted((row for row in timed if row["computation"] == timed[-1]["computation"]), key=lambda row: row["median"])
    leaders = [row["by"] for row in ranked[:2]]
    tells = len(ranked) > 1 and not any(is_disturbed(row) for row in timed if row["by"] in leaders)
    fastest = ranked[0] if tells else None
    cells = []
    for name in names:
        own = [row for row in together if row["by"] == name]
        text = " / ".join(map(_figure, own)) or "-"
        cells.append(f"**{text}**" if fastest and any(row is fastest for row in own) else text)
    return cells


def _figure(row: dict) -> str:
    if not row.get("median"):
        return row["outcome"]
    doubt = "?" if is_disturbed(row) else ""
    if row["kind"] in IN_MICROSECONDS:
        return table.duration(row["median"], row["kind"]) + doubt
    return (f"{row['tflops']:.0f}" if row["tflops"] >= 10 else f"{row['tflops']:#.2g}") + doubt


def _failures(content: dict) -> list[str]:
    """The reasons for the words in the table, each once."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in content["rows"]:
        if not row["verified"]:
            outcome = "-" if row["outcome"] == "left out" else row["outcome"]
            reasons.setdefault((row["by"], outcome, row.get("problem") or ""), []).append(row["contest"])
    lines = [f"- {by}, {outcome}: {problem} ({where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''})"
             for (by, outcome, problem), where in reasons.items()]
    return ["Without a time:\n\n" + "\n".join(lines)] if lines else []


def _all_rows(content: dict) -> list[str]:
    parts = []
    for kind, rows in table.by_kind(table.measured(content)).items():
        every = _table(*_every_field(rows, content["baseline"]))
        parts.append(f"<details><summary>All rows: {kind}</summary>\n\n{every}\n\n</details>")
    return parts


def _shape(row: dict) -> str:
    """The case and its sizes."""
    sizes = "x".join(str(row[key]) for key in ("tokens", "hidden", "ffn") if row[key])
    return f"{row['case']} {sizes} e{row['experts']}k{row['top_k']}"


def _times(row: dict, part: str | None = None) -> str:
    timing = row[part] if part else row
    return table.duration(timing["median"], row["kind"])


# For each column: its heading, its alignment, the key without which a row's cell is empty, and the text of the cell.
_COLUMNS = (
    ("case TxH[xF]", "<", "case", _shape),
    ("routing", "<", "routing", lambda row: row["routing"]),
    ("align", ">", "align", lambda row: str(row["align"])),
    ("computation", "<", "computation", lambda row: row["computation"]),
    ("GiB at most", ">", "memory_limit", lambda row: f"{row['memory_limit']:g}"),
    ("by", "<", "by", lambda row: row["by"]),
    ("verified", "<", "verified", lambda row: "yes" if row["verified"] else "NO"),
    ("median {unit}", ">", "median", _times),
    ("quartiles {unit}", ">", "quartiles",
     lambda row: " - ".join(table.duration(end, row["kind"]) for end in row["quartiles"])),
    ("forward {unit}", ">", "forward", lambda row: _times(row, "forward")),
    ("backward {unit}", ">", "backward", lambda row: _times(row, "backward")),
    ("kernels {unit}", ">", "kernels", lambda row: table.duration(row["kernels"], row["kind"])),
    ("TFLOP/s", ">", "tflops", lambda row: f"{row['tflops']:#.3g}"),
    ("{bandwidth}", ">", "terabytes", table.bandwidth),
    ("of limit", ">", "of_limit", lambda row: f"{row['of_limit']:.0%} {row['bound_by']}"),
    ("J", ">", "joules", table.joules),
    ("x {baseline}", ">", "speedup", lambda row: f"{row['speedup']:.2f}"),
    ("extra peak MiB", ">", "extra_peak_bytes", lambda row: f"{row['extra_peak_bytes'] / 2**20:.0f}"),
    ("largest/mean expert", ">", "imbalance", lambda row: f"{row['imbalance']:.2f}"),
    ("", "<", "problem", lambda row: f"{row['outcome']}: {row['problem']}"),
)


def _every_field(rows: Sequence[dict], baseline: str) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """(headings with their alignment, cells) for rows of one kind, with all columns that have any value."""
    kind = rows[0]["kind"]
    names = {"unit": table.unit(kind), "bandwidth": table.bandwidth_unit(kind), "baseline": baseline}
    shown = [column for column in _COLUMNS if any(row.get(column[2]) is not None for row in rows)]
    headings = [(heading.format(**names), align) for heading, align, *_ in shown]
    return headings, [["-" if row.get(key) is None else cell(row) for _, _, key, cell in shown] for row in rows]
