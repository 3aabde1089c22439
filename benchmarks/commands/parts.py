"""A suite in parts: its list of configurations, and one of them, whose result is not made again where it is there."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.result_files import reading
from gbmoe._checks import dtype_name
from gbmoe.cli.bench import result_file
from gbmoe.cli.bench.command import Run, judge, refused, timed
from gbmoe.cli.bench.measurements.measurement import Configuration


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare --list-configs, --config, --output and --force."""
    parser.add_argument("--list-configs", action="store_true",
                        help="print each configuration's index, a tab and its name; run nothing")
    parser.add_argument("--config", type=int, metavar="I",
                        help="run only this configuration and write it to --output, unless its result is there already")
    parser.add_argument("--output", type=Path, metavar="DIR", help="the folder in which --config writes SUITE-IIII.json")
    parser.add_argument("--force", action="store_true", help="run --config even if its result is there already")


def run(planned: Run) -> int:
    """Do what these options ask for, or measure the whole suite; returns the exit status."""
    arguments, names = planned.arguments, [configuration.name for configuration in planned.configurations]
    if arguments.list_configs:
        print("\n".join(f"{index}\t{name}" for index, name in enumerate(names)))
        return 0
    problem = _problem(planned)
    if problem:
        return refused(problem) if planned.suite.processes.tells() else 2
    if arguments.config is None:
        return planned.measure_all()
    with planned.together():
        return _run_part(planned, planned.configurations[arguments.config])


def _problem(planned: Run) -> str | None:
    arguments, last = planned.arguments, len(planned.configurations) - 1
    if (arguments.config is None) != (arguments.output is None):
        return "--config and --output belong together"
    if arguments.config is None:
        return None
    if not 0 <= arguments.config <= last:
        return f"--config: expected 0 to {last}, got {arguments.config}"
    return result_file.make_folder("--output", arguments.output) if planned.suite.processes.tells() else None


def _run_part(planned: Run, configuration: Configuration) -> int:
    arguments, processes = planned.arguments, planned.suite.processes
    path, tells = arguments.output / f"{arguments.suite}-{arguments.config:04d}.json", processes.tells()
    if not arguments.force:
        content = processes.agreed(_read(path))
        if content is not None:
            other = _of_another_run(content, planned, configuration)
            if other:
                return refused(f"--output: {path} {other}; --force does it again") if tells else 2
            if tells:
                print(f"{path} is there already; --force runs its configuration again")
            return judge(content, tells)
    return planned.measure([configuration], path)


def _of_another_run(content: dict, planned: Run, configuration: Configuration) -> str | None:
    """In what the content of a file differs from what this run would write into it, as far as its options tell; None where in nothing."""
    timing, found = planned.timing, reading.timing(content)
    if found not in (None, timing):
        return f"is timed {timed(found)}, and this run is to be {timed(timing)}"
    if not content["runs"]:
        return None
    run, options, about = content["runs"][0], planned.options(), planned.suite.processes.about()
    pairs = {"configuration": (run["configurations"], [configuration.name]),
             "device": (run["machine"]["device"], planned.choice.device.type), "dtype": (run["dtype"], dtype_name(planned.choice.dtype))}
    pairs |= {name: (run.get(name), value) for name, value in about.items()}
    pairs |= {name: (run.get("options", options).get(key), options[key]) for name, key in
              (("engines", "engines"), ("rivals", "peers"), ("quick", "quick"), ("memory_limit", "memory_limit"))}
    return next((f"is of {name} {_words(there)}, and this run of {_words(here)}" for name, (there, here) in pairs.items() if there != here),
                None)


def _words(value: object) -> str:
    return ", ".join(value) or "nobody" if isinstance(value, (list, tuple)) else str(value)


def _read(path: Path) -> dict | None:
    """The content of the file, or None where it is missing or broken."""
    try:
        return reading.read(path)
    except reading.BrokenFile:
        return None
