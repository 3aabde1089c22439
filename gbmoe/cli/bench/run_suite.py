"""`gbmoe bench --suite NAME`: run a suite, or one configuration of it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from gbmoe import engines
from gbmoe.cli.bench import peers, results, show
from gbmoe.cli.bench.measure import Conditions, few_threads
from gbmoe.cli.bench.measurement import Configuration
from gbmoe.cli.bench.runner import Runner, measure_limits, total
from gbmoe.cli.bench.suites import SUITES, Choice, Suite
from gbmoe.cli.bench.timing import QUICK, THOROUGH
from gbmoe.cli.machine import DTYPES, describe_clocks, device_argument
from gbmoe.layers.arguments import default_device


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --suite and what belongs to it."""
    summaries = "; ".join(f"{name}: {suite.summary}" for name, suite in SUITES.items())
    parser.add_argument("--suite", choices=SUITES, help=summaries)
    parser.add_argument("--device", type=device_argument, help="cpu or cuda (default: cuda where there is a device);"
                        " suites made for CUDA run on a CPU only when it is asked for, with scaled-down shapes")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on CUDA, fp32 on the CPU")
    parser.add_argument("--engines", type=_names, metavar="A,B", help="gbmoe's engines (default: all that are able)")
    parser.add_argument("--peers", default="all", metavar="A,B|all|none",
                        help=f"of {', '.join(peers.PEERS)} (default: all that belong to the suite)")
    parser.add_argument("--baseline", metavar="NAME",
                        help="whom speed-ups are over: a peer, or gbmoe-ENGINE (default: the suite's)")
    parser.add_argument("--memory-limit", type=float, metavar="GiB", help="of device memory for each measurement")
    parser.add_argument("--quick", action="store_true", help="a fifth of the repetitions")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS",
                        help="a peer's for one measurement (default: 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what ran where and all rows to FILE")
    parser.add_argument("--list-configs", action="store_true",
                        help="print index, tab and name of each configuration, run nothing")
    parser.add_argument("--config", type=int, metavar="I",
                        help="run this configuration alone, into --output, unless it is there")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where --config writes SUITE-IIII.json")
    parser.add_argument("--force", action="store_true", help="run --config although its result is there")


def run(arguments: argparse.Namespace) -> int:
    """0; 1 where anything of gbmoe is wrong, whatever becomes of its peers; 2 for arguments that make no sense."""
    problem = _problem(arguments)
    if problem:
        print(f"gbmoe bench: {problem}", file=sys.stderr)
        return 2
    suite, choice = SUITES[arguments.suite], _choice(arguments)
    configurations = suite.configurations(choice)
    if arguments.list_configs:
        print("\n".join(f"{index}\t{configuration.name}" for index, configuration in enumerate(configurations)))
        return 0
    taking_part = {measurement.by for configuration in configurations for measurement in configuration.measurements}
    if arguments.baseline and arguments.baseline not in taking_part:
        print(f"gbmoe bench: --baseline: expected one of {', '.join(sorted(taking_part))}, got {arguments.baseline!r}", file=sys.stderr)
        return 2
    last = len(configurations) - 1
    if arguments.config is not None and not 0 <= arguments.config <= last:
        print(f"gbmoe bench: --config: expected 0 to {last}, got {arguments.config}", file=sys.stderr)
        return 2
    with few_threads(choice.device):
        if arguments.config is None:
            return _run_and_show(arguments, choice, configurations, configurations, arguments.json)
        return _run_part(arguments, choice, configurations)


def _problem(arguments: argparse.Namespace) -> str | None:
    if arguments.suite is None:
        return "expected --suite, merge, plot or report; see --help"
    if SUITES[arguments.suite].needs_cuda and arguments.device is None and default_device().type != "cuda":
        return f"suite {arguments.suite} is made for CUDA and there is no CUDA device; --device cpu runs it scaled down"
    for option, given, known in (("--engines", arguments.engines or (), engines.names()),
                                 ("--peers", _peers(arguments), peers.PEERS)):
        for name in given:
            if name not in known:
                return f"{option}: expected names of {', '.join(known)}, got {name!r}"
    device = arguments.device or default_device()
    for name in arguments.engines or ():
        reason = None if name == "auto" else engines.ENGINES[name].unavailable(device)
        if reason:
            return f"--engines: {name} {reason}"
    if arguments.memory_limit is not None and arguments.memory_limit <= 0:
        return f"--memory-limit: expected more than 0 GiB, got {arguments.memory_limit:g}"
    if (arguments.config is None) != (arguments.output is None):
        return "--config and --output belong together"
    return results.no_place("--json", arguments.json) if arguments.json else None


def _peers(arguments: argparse.Namespace) -> list[str]:
    if arguments.peers in ("all", "none"):
        return list(SUITES[arguments.suite].peers) if arguments.peers == "all" else []
    return _names(arguments.peers)


def _choice(arguments: argparse.Namespace) -> Choice:
    device = arguments.device or default_device()
    dtype = DTYPES[arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    return Choice(device, dtype, arguments.engines, _peers(arguments), arguments.memory_limit)


def _run_part(arguments: argparse.Namespace, choice: Choice, configurations: list[Configuration]) -> int:
    path = arguments.output / f"{arguments.suite}-{arguments.config:04d}.json"
    if not arguments.force:
        try:
            content = results.read(path)
        except results.BrokenFile:
            pass  # not there, or not whole
        else:
            print(f"{path} is there; --force runs its configuration again")
            return _judge(content)
    arguments.output.mkdir(parents=True, exist_ok=True)
    return _run_and_show(arguments, choice, configurations, [configurations[arguments.config]], path)


def _run_and_show(arguments: argparse.Namespace, choice: Choice, configurations: list[Configuration],
                  chosen: list[Configuration], path: Path | None) -> int:
    suite = SUITES[arguments.suite]
    conditions = Conditions(choice.device, choice.dtype, QUICK if arguments.quick else THOROUGH)
    limits, limit_rows = measure_limits(conditions)
    conditions = replace(conditions, limits=limits)
    about = results.describe_run(conditions, limit_rows)
    about |= {"engines_left_out": _engines_left_out(suite, choice, chosen), "configurations": [],
              "options": {"engines": choice.engines, "peers": choice.peers, "quick": arguments.quick, "timeout": arguments.timeout}}
    content = {"suite": arguments.suite, "baseline": arguments.baseline or suite.baseline,
               "configurations": [configuration.name for configuration in configurations], "runs": [about], "rows": []}
    with Runner(conditions, arguments.timeout) as runner, show.Progress(total(chosen)) as progress:
        for configuration in chosen:
            content["rows"] += [row | {"run": 0} for row in runner.run(configuration, progress.advance)]
            about["configurations"].append(configuration.name)
            about |= {"peers": runner.peers_about, "peers_left_out": runner.peers_left_out,
                      "clocks_at_end": describe_clocks(choice.device)}
            results.finish(content)
            if path:  # after each, so that a run that is cut off leaves what it has done
                results.write(path, content)
    show.print_content(content)
    return _judge(content)


def _judge(content: dict) -> int:
    faults = results.faults(content)
    for fault in faults:
        print(f"FAIL: {fault}")
    return 1 if faults else 0


def _engines_left_out(suite: Suite, choice: Choice, chosen: list[Configuration]) -> dict[str, str]:
    if not suite.uses_engines:
        return {}
    shapes = {measurement.case for configuration in chosen for measurement in configuration.measurements}
    return {name: reason for case in shapes for name, reason in choice.unable(case).items()}
