"""`gbmoe bench --shape SIZES` and `--suite NAME`: the options of a run, what is wrong with them, and the run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gbmoe import engines
from gbmoe.cli.bench import checkout, result_file, rivals, table
from gbmoe.cli.bench.measurements.measurement import Configuration
from gbmoe.cli.bench.roofline import Limits
from gbmoe.cli.bench.running.burst_timer import QUICK, THOROUGH
from gbmoe.cli.bench.running.parent_process import measure_limits, total
from gbmoe.cli.bench.running.verify_and_time import BURSTS, SUSTAINED, Conditions, few_threads, measure
from gbmoe.cli.bench.suites import OF_SHAPES, SUITES, Choice, Suite
from gbmoe.cli.describe_system import DTYPES, describe_clocks, device_argument
from gbmoe.layers.arguments import default_device
from gbmoe.testing.moe_shapes import MoeCase, own_case

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


# -------------------------------------------------------------------------------------------------------------- in a wheel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a run, and the names of the commands that a checkout has."""
    add_options(parser, SUITES)
    commands = parser.add_subparsers(metavar=" | ".join(checkout.COMMANDS))
    for name in checkout.COMMANDS:
        # Without a prefix that begins options, every word after it is one of `words`.
        command = commands.add_parser(name, help="in a checkout", add_help=False, prefix_chars="\0")
        command.add_argument("words", nargs="*")
        command.set_defaults(run=lambda _, name=name: refused(checkout.absent(f"bench {name}")))


def run(arguments: argparse.Namespace) -> int:
    """0; 1 where anything of gbmoe is wrong, whatever becomes of its rivals; 2 for arguments that make no sense."""
    planned = plan(arguments, SUITES)
    return refused(planned) if isinstance(planned, str) else planned.measure_all()


def refused(problem: str) -> int:
    """Say on stderr what is wrong with the call; returns its exit status."""
    print(f"gbmoe bench: {problem}", file=sys.stderr)
    return 2


# ---------------------------------------------------------------------------------------------------------------- options


def add_options(parser: argparse.ArgumentParser, suites: Mapping[str, Suite]) -> None:
    """Declare the options of a run."""
    summaries = "; ".join(f"{name}: {suite.summary}" for name, suite in suites.items())
    parser.add_argument("--suite", choices=list(dict.fromkeys((*suites, *checkout.SUITES))), help=summaries)
    parser.add_argument("--shape", type=_shape, action="append", default=[], metavar=_OF_A_SHAPE,
                        help="a layer of yours, a GLU or a plain MLP, in place of those of a suite"
                        f" ({_that_take_shapes(suites)}; default: {OF_SHAPES}); may be repeated; is not scaled down on a CPU")
    parser.add_argument("--device", type=device_argument, help="cpu or cuda (default: cuda where there is a device);"
                        " suites made for CUDA run on a CPU only when it is asked for, with scaled-down shapes")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on CUDA and for suite float8, fp32 on the CPU")
    parser.add_argument("--engines", type=_names, metavar="A,B", help="gbmoe's engines (default: all that can compute the case)")
    parser.add_argument("--rivals", "--peers", default="all", metavar="A,B|all|none",
                        help=f"some of {', '.join(rivals.RIVALS)} (default: all that belong to the suite)")
    parser.add_argument("--baseline", metavar="NAME",
                        help="the baseline of speed-ups: a rival, or gbmoe-ENGINE (default: the suite's)")
    parser.add_argument("--memory-limit", type=float, metavar="GiB", help="the device memory that a measurement may take")
    parser.add_argument("--timing", choices=(SUSTAINED, BURSTS),
                        help=f"{SUSTAINED}: each implementation in a process of its own, in turns: half a second of work, then half a"
                        f" second that is timed, in three rounds, with the energy where nvidia-ml-py is installed; {BURSTS}: single"
                        f" calls, each with a cold L2 cache (default: {SUSTAINED} on CUDA for suites of layers and products)")
    parser.add_argument("--quick", action="store_true", help="a fifth of the repetitions, or of the time")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS",
                        help="how long a rival may take for one measurement, and how long a rank waits for the others (default: 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the machine, the versions and all rows to FILE")


def plan(arguments: argparse.Namespace, suites: Mapping[str, Suite], *, listing: bool = False) -> Run | str:
    """The run that the options ask for, or in a line what is wrong with them. With `listing` nothing is to run, so that neither other
    processes nor folders are asked for."""
    if arguments.shape and arguments.suite is None:
        arguments.suite = OF_SHAPES
    problem = _problem(arguments, suites)
    if problem is None and not listing:
        problem = _impossible(arguments, suites[arguments.suite])
    if problem is not None:
        return problem
    suite = suites[arguments.suite]
    choice = _choice(arguments, suite, listing)
    configurations = suite.configurations(choice)
    problem = _nobody(choice, configurations)
    taking_part = {measurement.by for configuration in configurations for measurement in configuration.measurements}
    if problem is None and not listing and arguments.baseline and arguments.baseline not in taking_part:
        problem = f"--baseline: expected one of {', '.join(sorted(taking_part))}, got {arguments.baseline!r}"
    return problem or Run(arguments, suite, choice, configurations)


def _problem(arguments: argparse.Namespace, suites: Mapping[str, Suite]) -> str | None:
    if arguments.suite is None:
        return f"expected --shape, --suite, {', '.join(checkout.COMMANDS[:-1])} or {checkout.COMMANDS[-1]}; see --help"
    suite = suites.get(arguments.suite)
    if suite is None or (suite.of_shapes_alone and not arguments.shape):
        return checkout.absent(f"suite {arguments.suite}")
    if suite.needs_cuda and arguments.device is None and default_device().type != "cuda":
        how = "as it is" if arguments.shape else "scaled down"
        return f"suite {arguments.suite} is made for CUDA and there is no CUDA device; --device cpu runs it {how}"
    if arguments.shape and not suite.takes_shapes:
        return f"--shape: suite {arguments.suite} has shapes of its own; expected suite {_that_take_shapes(suites)}, or none"
    if arguments.timing not in (None, *suite.timings):
        return f"--timing: suite {arguments.suite} is timed {timed(suite.timings[0])} alone"
    for option, given, known in (("--engines", arguments.engines or (), engines.names()),
                                 ("--rivals", _rivals(arguments, suite), rivals.RIVALS)):
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
    return None


def _impossible(arguments: argparse.Namespace, suite: Suite) -> str | None:
    """Why the run is not possible, or why its file cannot be written."""
    for option in suite.processes.refused:
        if getattr(arguments, option) is not None:
            return f"--{option.replace('_', '-')}: suite {arguments.suite} takes none"
    problem = suite.processes.problem(arguments.suite, arguments.device or default_device())
    if problem is None and arguments.json and suite.processes.tells():
        problem = result_file.make_folder_for("--json", arguments.json)
    return problem


def _that_take_shapes(suites: Mapping[str, Suite]) -> str:
    return " or ".join(name for name, suite in suites.items() if suite.takes_shapes)


def _nobody(choice: Choice, configurations: Sequence[Configuration]) -> str | None:
    """What is wrong where nothing that takes part computes one of --shape, or anything of the suite."""
    measured = {measurement.case for configuration in configurations for measurement in configuration.measurements}
    for shape in choice.shapes:
        if shape not in measured:
            reasons = "; ".join(f"{name} {reason}" for name, reason in choice.unable(shape).items()) or "none is named"
            return f"--shape: expected one that --engines or --rivals compute here, got {shape.name}: {reasons}"
    return None if configurations else "--engines, --rivals: expected some that compute the suite here, got none"


def timed(timing: str) -> str:
    """How rows are timed, in words that follow "timed"."""
    return f"in {timing}" if timing == BURSTS else timing


def _rivals(arguments: argparse.Namespace, suite: Suite) -> list[str]:
    if arguments.rivals in ("all", "none"):
        return list(suite.rivals) if arguments.rivals == "all" else []
    return _names(arguments.rivals)


def _choice(arguments: argparse.Namespace, suite: Suite, listing: bool) -> Choice:
    device = arguments.device or default_device()
    if not listing:
        device = suite.processes.device(device)
    dtype = DTYPES[arguments.dtype or suite.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    shapes = tuple(dict.fromkeys(arguments.shape))  # each once
    return Choice(device, dtype, arguments.engines, _rivals(arguments, suite), arguments.memory_limit, shapes)


# -------------------------------------------------------------------------------------------------------------------- run


@dataclass(frozen=True)
class Run:
    """What is measured, and how."""
    arguments: argparse.Namespace
    suite: Suite
    choice: Choice
    configurations: list[Configuration]

    @property
    def timing(self) -> str:
        return self.arguments.timing or self.suite.timing(self.choice.device)

    def options(self) -> dict:
        """The options that a result file names."""
        names = ("quick", "timeout", "memory_limit")
        return {"engines": self.choice.engines, "peers": self.choice.rivals} | {name: getattr(self.arguments, name) for name in names}

    @contextmanager
    def together(self) -> Iterator[None]:
        """In this context all processes of the run are there, each with few threads."""
        with few_threads(self.choice.device), self.suite.processes.joined(self.choice.device, self.arguments.timeout):
            yield

    def measure_all(self) -> int:
        """Measure every configuration, write --json and print; returns the exit status."""
        with self.together():
            return self.measure(self.configurations, self.arguments.json)

    def measure(self, chosen: Sequence[Configuration], path: Path | None) -> int:
        """Measure some configurations, write the file and print; returns the exit status. To be called in together()."""
        arguments, suite, processes = self.arguments, self.suite, self.suite.processes
        conditions = Conditions(self.choice.device, self.choice.dtype, QUICK if arguments.quick else THOROUGH, timing=self.timing)
        limits, limit_rows = self._limits(conditions)
        conditions = replace(conditions, limits=limits)
        about = result_file.describe_run(conditions, limit_rows)
        about |= {"engines_left_out": self._engines_left_out(chosen), "configurations": [], "options": self.options()}
        about |= processes.about()
        content = {"suite": arguments.suite, "baseline": arguments.baseline or suite.baseline,
                   "configurations": [configuration.name for configuration in self.configurations], "runs": [about], "rows": []}
        if conditions.timing == SUSTAINED:
            about |= {"sustained": processes.effort(arguments.quick).in_words(),
                      "energy_left_out": processes.why_no_energy(self.choice.device)}
        tells, idle = processes.tells(), self._rivals_without_a_row()
        with self._runner(conditions) as runner, table.progress(total(chosen), tells) as advance:
            for configuration in chosen:
                content["rows"] += [row | {"run": 0} for row in runner.run(configuration, advance)]
                about["configurations"].append(configuration.name)
                about |= {"peers": runner.rivals_about, "peers_left_out": idle | runner.rivals_left_out,
                          "clocks_at_end": describe_clocks(self.choice.device)}
                result_file.finish(content)
                if path and tells:  # after each configuration, so that an interrupted run keeps what it has done
                    try:
                        result_file.write(path, content)
                    except OSError as error:  # the folder could be written to at first
                        return refused(f"{path}: {error.strerror}")
        if tells:
            table.print_content(content)
        return judge(content, tells)

    def _runner(self, conditions: Conditions):
        return self.suite.processes.runner(conditions, self.arguments.quick, self.arguments.timeout)

    def _limits(self, conditions: Conditions) -> tuple[Limits, list[dict]]:
        """The limits and their rows, timed as all rows are; where there are ranks, on all at once."""
        if conditions.timing == BURSTS:
            return measure_limits(conditions, lambda limit: measure(limit, conditions))
        with self._runner(conditions) as runner:  # its processes end before others begin
            return measure_limits(conditions, lambda limit: runner.run(Configuration(limit.setting, (limit,)))[0])

    def _rivals_without_a_row(self) -> dict[str, str]:
        """Why rivals that --rivals names measure nothing of this suite: they compute other things than it has."""
        measured = {measurement.implementation for configuration in self.configurations for measurement in configuration.measurements}
        named = [] if self.arguments.rivals == "all" else self.choice.rivals
        return {rival: f"computes nothing that suite {self.arguments.suite} measures" for rival in named if rival not in measured}

    def _engines_left_out(self, chosen: Sequence[Configuration]) -> dict[str, str]:
        if not self.suite.uses_engines:
            return {}
        shapes = {measurement.case for configuration in chosen for measurement in configuration.measurements}
        return {name: reason for case in shapes for name, reason in self.choice.unable(case).items()}


def judge(content: dict, tells: bool = True) -> int:
    """The exit status that rows mean, and a line for each fault of gbmoe's."""
    faults = result_file.faults(content)
    for fault in faults if tells else ():
        print(f"FAIL: {fault}")
    return 1 if faults else 0
