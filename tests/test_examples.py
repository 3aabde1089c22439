"""Every program in examples/ runs as its first lines say, and does what it is there to show."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.forked_python import python

EXAMPLES = Path(__file__).parent.parent / "examples"
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def printed_by(name: str, *launcher: str, arguments: tuple[str, ...] = ()) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(EXAMPLES.parent), os.environ.get("PYTHONPATH")))),
                                "OMP_NUM_THREADS": "1"}
    command = [python(), *launcher, str(EXAMPLES / name), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def numbers(text: str, pattern: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


def outputs(text: str) -> list[float]:
    """(the largest difference, the largest output)"""
    return [float(number) for number in re.search(r"outputs: (\S+), of (\S+)", text).groups()]


def needs(package: str):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed; scripts/test.sh installs it")


def test_all_of_them_are_tested():
    tested = re.findall(r'printed_by\("(\w+\.py)"', Path(__file__).read_text())
    assert sorted(set(tested)) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@needs("megablocks")
def test_megablocks_switch():
    text = printed_by("megablocks_switch.py")
    difference, largest = outputs(text)
    assert difference <= 0.02 * largest
    losses = numbers(text, r"loss (\S+)")
    assert losses[-1] < losses[0]


@needs("transformers")
def test_transformers_finetuning():
    losses = numbers(printed_by("transformers_finetuning.py"), r"loss (\S+)")
    assert losses[-1] < losses[0] - 0.3


@needs("peft")
def test_transformers_finetuning_of_adapters():
    losses = numbers(printed_by("transformers_finetuning.py", arguments=("--lora", "8", "--lr", "0.02")), r"loss (\S+)")
    assert losses[-1] < losses[0] - 0.2


def test_expert_parallelism():
    text = printed_by("expert_parallelism.py", *RANKS)
    assert set(re.findall(r"rank (\d) of 2", text)) == {"0", "1"}
    losses = numbers(text, r"mean loss (\S+)")
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_float8_training():
    losses = [[float(loss) for loss in line.split()[-5:]] for line in printed_by("float8_training.py").splitlines()]
    assert len(losses) == 3
    for of_recipe in losses:
        assert of_recipe[-1] < of_recipe[0]
        assert of_recipe == pytest.approx(losses[0], rel=2e-3)


@pytest.mark.slow
def test_replay():
    text = printed_by("replay.py")
    differences, largest = numbers(text, r"differ by (\S+)"), numbers(text, r"differ by \S+ of ([^\s,]+)")
    for difference, of in list(zip(differences, largest))[::2]:  # with the generator's weights; on a CPU only to rounding
        assert difference <= 1e-5 * of
    others = numbers(text, r"([\d.]+)% of the choices")
    assert min(others[1::2]) > 1
    rewards = numbers(text, r"reward ([^\s,]+)")
    assert rewards[-1] > rewards[0] + 0.2


@needs("transformers")
def test_converted_checkpoint():
    difference, largest = outputs(printed_by("converted_checkpoint.py"))
    assert difference <= 1e-5 * largest
