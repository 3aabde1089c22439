"""`gbmoe bench --suite NAME`: run a suite, or one configuration of it."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from gbmoe import engines
from gbmoe._checks import dtype_name
from gbmoe.cli.bench import peers
from gbmoe.cli.bench.measurements.base import Configuration
from gbmoe.cli.bench.results import run_file, table_and_progress
from gbmoe.cli.bench.roofline import Limits
from gbmoe.cli.bench.running import rank_processes
from gbmoe.cli.bench.running.cold_cache_timer import QUICK, THOROUGH
from gbmoe.cli.bench.running.energy import counter_of
from gbmoe.cli.bench.running.parent_process import Runner, measure_limits, total
from gbmoe.cli.bench.running.process_turns import ProcessRunner
from gbmoe.cli.bench.running.repeat import Sustained
from gbmoe.cli.bench.running.sustained_timer import AMONG_RANKS, AMONG_RANKS_QUICK
from gbmoe.cli.bench.running.verify_and_time import BURSTS, SUSTAINED, Conditions, few_threads, measure
from gbmoe.cli.bench.suites import SUITES, Choice, Suite
from gbmoe.cli.describe_system import DTYPES, describe_clocks, device_argument
from gbmoe.layers.arguments import default_device
from gbmoe.testing.moe_shapes import MoeCase, own_case

IN_TURNS, IN_TURNS_QUICK = Sustained(0.5, 3), Sustained(0.1, 3)
_OF_A_SHAPE = "tokens,hidden,ffn,experts,top_k[,mlp]"


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _shape(text: str) -> MoeCase:
    """argparse type of --shape."""
    *sizes, last = text.split(",")
    mlp_type = last if last in ("mlp", "glu") else "glu"
    sizes += [] if last == mlp_type else [last]
    if len(sizes) != 5 or not all(size.isascii() and size.isdigit() and 0 < int(size) < 2**31 for size in sizes):
        raise argparse.ArgumentTypeError(f"expected {_OF_A_SHAPE}, numbers above 0, got {text!r}")
    case = own_case(*map(int, sizes), mlp_type)
    if case.top_k > case.experts:
        raise argparse.ArgumentTypeError(f"expected {_OF_A_SHAPE} with top_k at most experts, got {text!r}")
    return case


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --suite and the options of a run."""
    summaries = "; ".join(f"{name}: {suite.summary}" for name, suite in SUITES.items())
    parser.add_argument("--suite", choices=SUITES, help=summaries)
    parser.add_argument("--shape", type=_shape, action="append", default=[], metavar=_OF_A_SHAPE,
                        help="a layer of yours, a GLU or a plain MLP, in place of those of suite layers (the default then) or float8;"
                        " as often as wanted, and not scaled down on a CPU")
    parser.add_argument("--device", type=device_argument, help="cpu or cuda (default: cuda where there is a device);"
                        " suites made for CUDA run on a CPU only when it is asked for, with scaled-down shapes")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on CUDA and for suite float8, fp32 on the CPU")
    parser.add_argument("--engines", type=_names, metavar="A,B", help="gbmoe's engines (default: all that can compute the case)")
    parser.add_argument("--peers", default="all", metavar="A,B|all|none",
                        help=f"some of {', '.join(peers.PEERS)} (default: all that belong to the suite)")
    parser.add_argument("--baseline", metavar="NAME",
                        help="whom speed-ups are over: a peer, or gbmoe-ENGINE (default: the suite's)")
    parser.add_argument("--memory-limit", type=float, metavar="GiB", help="of device memory for each measurement")
    parser.add_argument("--timing", choices=(SUSTAINED, BURSTS),
                        help=f"{SUSTAINED}: each implementation in a process of its own, in turns, half a second of work before half a"
                        f" second that is timed, three rounds, with the energy where nvidia-ml-py is installed; {BURSTS}: some calls"
                        f" apart, each with a cold L2 cache (default: {SUSTAINED} on CUDA for suites of layers and products)")
    parser.add_argument("--quick", action="store_true", help="a fifth of the repetitions, or of the time")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS",
                        help="how long a peer may take for one measurement, and a rank wait for the others (default: 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the machine, the versions and all rows to FILE")
    parser.add_argument("--list-configs", action="store_true",
                        help="print each configuration's index, a tab and its name; run nothing")
    parser.add_argument("--config", type=int, metavar="I",
                        help="run only this configuration and write it to --output, unless its result is there already")
    parser.add_argument("--output", type=Path, metavar="DIR", help="the folder in which --config writes SUITE-IIII.json")
    parser.add_argument("--force", action="store_true", help="run --config even if its result is there already")


def run(arguments: argparse.Namespace) -> int:
    """0; 1 where anything of gbmoe is wrong, whatever becomes of its peers; 2 for arguments that make no sense."""
    if arguments.shape and arguments.suite is None:
        arguments.suite = "layers"
    problem = _problem(arguments)
    if problem:
        if _tells(arguments):
            print(f"gbmoe bench: {problem}", file=sys.stderr)
        return 2
    suite, choice = SUITES[arguments.suite], _choice(arguments)
    configurations = suite.configurations(choice)
    problem = _nobody(choice, configurations)
    if problem:
        print(f"gbmoe bench: {problem}", file=sys.stderr)
        return 2
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
    together = rank_processes.joined(choice.device, arguments.timeout) if suite.on_ranks else nullcontext()
    with few_threads(choice.device), together:
        if arguments.config is None:
            return _run_and_show(arguments, choice, configurations, configurations, arguments.json)
        return _run_part(arguments, choice, configurations)


def _problem(arguments: argparse.Namespace) -> str | None:
    if arguments.suite is None:
        return "expected --suite, merge, plot or report; see --help"
    suite = SUITES[arguments.suite]
    if suite.needs_cuda and arguments.device is None and default_device().type != "cuda":
        how = "as it is" if arguments.shape else "scaled down"
        return f"suite {arguments.suite} is made for CUDA and there is no CUDA device; --device cpu runs it {how}"
    takes = " or ".join(name for name, each in SUITES.items() if each.takes_shapes)
    if arguments.shape and not suite.takes_shapes:
        return f"--shape: suite {arguments.suite} has shapes of its own; expected suite {takes}, or none"
    if arguments.timing not in (None, *suite.timings):
        return f"--timing: suite {arguments.suite} is timed {_timed(suite.timings[0])} alone"
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
    if not arguments.timeout > 0:
        return f"--timeout: expected more than 0 s, got {arguments.timeout:g}"
    if (arguments.config is None) != (arguments.output is None):
        return "--config and --output belong together"
    if suite.on_ranks and not arguments.list_configs:
        for option in ("engines", "memory_limit"):
            if getattr(arguments, option) is not None:
                return f"--{option.replace('_', '-')}: suite {arguments.suite} takes none"
        problem = rank_processes.problem(arguments.suite, device)
        if problem or not rank_processes.is_first():
            return problem
    if arguments.output and not arguments.list_configs:
        problem = run_file.make_folder("--output", arguments.output)
        if problem:
            return problem
    return run_file.make_folder_for("--json", arguments.json) if arguments.json else None


def _nobody(choice: Choice, configurations: list[Configuration]) -> str | None:
    """Which of --shape, or whether the whole suite, is computed by nobody who takes part."""
    measured = {measurement.case for configuration in configurations for measurement in configuration.measurements}
    for shape in choice.shapes:
        if shape not in measured:
            reasons = "; ".join(f"{name} {reason}" for name, reason in choice.unable(shape).items()) or "none is named"
            return f"--shape: expected one that --engines or --peers compute here, got {shape.name}: {reasons}"
    return None if configurations else "--engines, --peers: expected some that compute the suite here, got none"


def _timed(timing: str) -> str:
    return f"in {timing}" if timing == BURSTS else timing


def _peers(arguments: argparse.Namespace) -> list[str]:
    if arguments.peers in ("all", "none"):
        return list(SUITES[arguments.suite].peers) if arguments.peers == "all" else []
    return _names(arguments.peers)


def _choice(arguments: argparse.Namespace) -> Choice:
    device = arguments.device or default_device()
    if SUITES[arguments.suite].on_ranks and not arguments.list_configs:
        device = rank_processes.device_of_rank(device)
    dtype = DTYPES[arguments.dtype or ("bf16" if device.type == "cuda" or arguments.suite == "float8" else "fp32")]
    # Of one that is given twice the same.
    return Choice(device, dtype, arguments.engines, _peers(arguments), arguments.memory_limit, tuple(dict.fromkeys(arguments.shape)))


def _timing(arguments: argparse.Namespace, choice: Choice) -> str:
    return arguments.timing or SUITES[arguments.suite].timing(choice.device)


def _run_part(arguments: argparse.Namespace, choice: Choice, configurations: list[Configuration]) -> int:
    path = arguments.output / f"{arguments.suite}-{arguments.config:04d}.json"
    if not arguments.force:
        content = _read(path)
        if SUITES[arguments.suite].on_ranks:
            content = rank_processes.of_first_rank(content)
        if content is not None:
            tells, other = _tells(arguments), _of_another_run(content, arguments, choice, configurations[arguments.config])
            if other:
                if tells:
                    print(f"gbmoe bench: --output: {path} {other}; --force does it again", file=sys.stderr)
                return 2
            if tells:
                print(f"{path} is there already; --force runs its configuration again")
            return _judge(content, tells)
    return _run_and_show(arguments, choice, configurations, [configurations[arguments.config]], path)


def _of_another_run(content: dict, arguments: argparse.Namespace, choice: Choice, configuration: Configuration) -> str | None:
    """In what the content of a file differs from what this run would write into it, as far as its options tell; None where in nothing."""
    timing, found = _timing(arguments, choice), run_file.timing(content)
    if found not in (None, timing):
        return f"is timed {_timed(found)}, and this run is to be {_timed(timing)}"
    if not content["runs"]:
        return None
    run, options = content["runs"][0], _options(arguments, choice)
    pairs = {"configuration": (run["configurations"], [configuration.name]), "device": (run["machine"]["device"], choice.device.type),
             "dtype": (run["dtype"], dtype_name(choice.dtype))}
    if SUITES[arguments.suite].on_ranks:
        pairs["ranks"] = run.get("ranks"), rank_processes.count()
    pairs |= {name: (run.get("options", options).get(name), options[name]) for name in ("engines", "peers", "quick", "memory_limit")}
    return next((f"is of {name} {_words(there)}, and this run of {_words(here)}" for name, (there, here) in pairs.items() if there != here),
                None)


def _words(value: object) -> str:
    return ", ".join(value) or "nobody" if isinstance(value, (list, tuple)) else str(value)


def _options(arguments: argparse.Namespace, choice: Choice) -> dict:
    return {"engines": choice.engines, "peers": choice.peers, "quick": arguments.quick, "timeout": arguments.timeout,
            "memory_limit": choice.memory_limit}


def _read(path: Path) -> dict | None:
    """The content of the file, or None where it is missing or broken."""
    try:
        return run_file.read(path)
    except run_file.BrokenFile:
        return None


def _run_and_show(arguments: argparse.Namespace, choice: Choice, configurations: list[Configuration],
                  chosen: list[Configuration], path: Path | None) -> int:
    suite, timing = SUITES[arguments.suite], _timing(arguments, choice)
    conditions = Conditions(choice.device, choice.dtype, QUICK if arguments.quick else THOROUGH, timing=timing)
    limits, limit_rows = _limits(conditions, suite, arguments)
    conditions = replace(conditions, limits=limits)
    about = run_file.describe_run(conditions, limit_rows)
    about |= {"engines_left_out": _engines_left_out(suite, choice, chosen), "configurations": [],
              "options": _options(arguments, choice)}
    content = {"suite": arguments.suite, "baseline": arguments.baseline or suite.baseline,
               "configurations": [configuration.name for configuration in configurations], "runs": [about], "rows": []}
    tells = _tells(arguments)
    if suite.on_ranks:
        about["ranks"] = rank_processes.count()
    runner = _runner(conditions, suite, arguments)
    if timing == SUSTAINED:
        about |= {"sustained": runner.effort.in_words(),
                  "energy_left_out": "of one GPU alone" if suite.on_ranks else counter_of(choice.device)[1]}
    idle = _peers_without_a_row(arguments, choice, configurations)
    with runner, table_and_progress.Progress(total(chosen)) if tells else nullcontext() as progress:
        for configuration in chosen:
            report = progress.advance if tells else (lambda _: None)
            content["rows"] += [row | {"run": 0} for row in runner.run(configuration, report)]
            about["configurations"].append(configuration.name)
            about |= {"peers": runner.peers_about, "peers_left_out": idle | runner.peers_left_out,
                      "clocks_at_end": describe_clocks(choice.device)}
            run_file.finish(content)
            if path and tells:  # after each configuration, so that an interrupted run keeps what it has done
                try:
                    run_file.write(path, content)
                except OSError as error:  # the folder could be written to at first
                    print(f"gbmoe bench: {path}: {error.strerror}", file=sys.stderr)
                    return 2
    if tells:
        table_and_progress.print_content(content)
    return _judge(content, tells)


def _runner(conditions: Conditions, suite: Suite, arguments: argparse.Namespace) -> Runner | ProcessRunner | rank_processes.RankRunner:
    if suite.on_ranks:
        return rank_processes.RankRunner(conditions, AMONG_RANKS_QUICK if arguments.quick else AMONG_RANKS)
    if conditions.timing == BURSTS:
        return Runner(conditions, arguments.timeout)
    return ProcessRunner(conditions, IN_TURNS_QUICK if arguments.quick else IN_TURNS, arguments.timeout)


def _limits(conditions: Conditions, suite: Suite, arguments: argparse.Namespace) -> tuple[Limits, list[dict]]:
    """Timed as the rows are: among ranks, on all of them at once."""
    if conditions.timing == BURSTS:
        return measure_limits(conditions, lambda limit: measure(limit, conditions))
    with _runner(conditions, suite, arguments) as runner:  # whose processes end before others begin
        return measure_limits(conditions, lambda limit: runner.run(Configuration(limit.setting, (limit,)))[0])


def _tells(arguments: argparse.Namespace) -> bool:
    """Whether this process prints and writes: where a suite runs on several ranks, only the first does."""
    return arguments.suite is None or not SUITES[arguments.suite].on_ranks or rank_processes.is_first()


def _judge(content: dict, tells: bool = True) -> int:
    faults = run_file.faults(content)
    for fault in faults if tells else ():
        print(f"FAIL: {fault}")
    return 1 if faults else 0


def _peers_without_a_row(arguments: argparse.Namespace, choice: Choice, configurations: list[Configuration]) -> dict[str, str]:
    """Why peers that --peers names measure nothing of this suite: they compute other things than it has."""
    measured = {measurement.implementation for configuration in configurations for measurement in configuration.measurements}
    named = [] if arguments.peers == "all" else choice.peers
    return {peer: f"computes nothing that suite {arguments.suite} measures" for peer in named if peer not in measured}


def _engines_left_out(suite: Suite, choice: Choice, chosen: list[Configuration]) -> dict[str, str]:
    if not suite.uses_engines:
        return {}
    shapes = {measurement.case for configuration in chosen for measurement in configuration.measurements}
    return {name: reason for case in shapes for name, reason in choice.unable(case).items()}
