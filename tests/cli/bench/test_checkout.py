"""A wheel has what measures one's own layers, and says where the rest is; a checkout has all of it, wherever it is called from."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gbmoe.cli import main
from gbmoe.cli.bench import checkout
from tests.cli.bench import hurried
from tests.forked_python import python

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The package as a wheel installs it, with a package of another project's named benchmarks next to it."""
    folder = tmp_path_factory.mktemp("site-packages")
    shutil.copytree(ROOT / "gbmoe", folder / "gbmoe", ignore=shutil.ignore_patterns("*.so*", "__pycache__"))
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "__init__.py").write_text("raise RuntimeError('another project')")
    return folder


def called(arguments, path, folder, **more):
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", **more}
    command = [python("torch"), hurried.__file__, "bench", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("arguments, what", [
    (["--suite", "layers"], "suite layers"), (["--suite", "parallel", "--device", "cpu"], "suite parallel"),
    (["merge", "parts", "--json", "a.json"], "bench merge"), (["plot", "--output", "pictures", "a.json"], "bench plot"),
    (["report"], "bench report")])
def test_a_wheel_names_what_is_in_a_checkout(arguments, what, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkout, "root", lambda: tmp_path)
    assert main(["bench", *arguments]) == 2
    line, = capsys.readouterr().err.splitlines()
    where = f"the checkout's folder benchmarks/, which is not next to this package (in {tmp_path})"
    assert line.startswith(f"gbmoe bench: {what} is in {where}")


@pytest.mark.slow
def test_a_wheel_measures_ones_own_layers(wheel, tmp_path):
    file = tmp_path / "mine.json"
    done = called(["--shape", "48,32,40,4,2", "--device", "cpu", "--quick", "--rivals", "bmm", "--timing", "sustained",
                   "--json", str(file)], wheel, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert {"bmm", "gbmoe-auto"} <= {row["by"] for row in rows} and all(row["verified"] and row["median"] for row in rows)
    assert "t48-h32-f40-e4-k2" in done.stdout


def test_a_package_that_is_installed_elsewhere_is_told_where_the_checkout_is(wheel, tmp_path):
    """As the jobs of scripts/slurm/ do."""
    done = called(["--suite", "permute", "--device", "cpu", "--list-configs"], wheel, tmp_path, GBMOE_CHECKOUT=str(ROOT))
    assert done.returncode == 0 and "permutation/" in done.stdout, done.stderr


def test_a_checkout_finds_its_folder_from_anywhere_and_no_other(tmp_path):
    """As an editable install does: the package is found, and its folder is on no path. There is another package of that name."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise RuntimeError('another project')")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "gbmoe").symlink_to(ROOT / "gbmoe")
    done = called(["--suite", "permute", "--device", "cpu", "--list-configs"], tmp_path / "path", tmp_path)
    assert done.returncode == 0 and "permutation/" in done.stdout, done.stderr
    done = called(["--suite", "float8", "--device", "cpu", "--quick", "--config", "0", "--timing", "sustained", "--output", "parts"],
                  tmp_path / "path", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr  # and so do the processes that take turns
    assert json.loads((tmp_path / "parts" / "float8-0000.json").read_text())["rows"]
