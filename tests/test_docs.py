"""README and docs/: the Python on every page runs, commands exist with their options, links and pictures are there."""

import contextlib
import dataclasses
import importlib
import importlib.util
import io
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from gbmoe import Arguments
from gbmoe.cli import main
from gbmoe.compat.checkpoints.models import MODEL_TYPES, WITH_TEXT_CONFIG
from gbmoe.layers.expert_parallel_options import FLAT_NAMES
from tests.compat import interfaces
from tests.forked_python import python

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "scripts").rglob("*.md"),
                *(ROOT / "results").rglob("README.md")])
OPTIONS = ROOT / "docs" / "options.md"
# A block that cannot run here says why, in a comment above it.
BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")


def blocks(page, language):
    return [code for skipped, found, code in BLOCK.findall(page.read_text()) if found == language and not skipped]


def page_id(page):
    return page.relative_to(ROOT).as_posix()


def test_a_second_block_that_is_not_run_hid_all_blocks_before_it(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("".join(f"{before}```python\n{code}\n```\n" for before, code in (
        ("<!-- not run: because -->\n", "a"), ("", "b"), ("<!-- not run: because -->\n", "c"), ("", "d"))))
    assert blocks(page, "python") == ["b\n", "d\n"]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=page_id)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path):
    """In a process of its own, because adapters change what later imports find."""
    code = "\n".join(blocks(page, "python"))
    for package in ("megablocks", "transformers"):
        if re.search(rf"^(from|import) {package}\b", code, re.MULTILINE) and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; scripts/test.sh installs it")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run([python(), "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_the_recipe_of_a_cuda_graph_computes_what_eager_steps_do():
    """On every other machine the page runs without a graph."""
    page = ROOT / "docs" / "recipes.md"
    shared, recipe = blocks(page, "python")[0], next(code for code in blocks(page, "python") if "CUDAGraph" in code)
    names = {}
    exec(shared + recipe, names)
    layer, optimizer, x, loss = (names[name] for name in ("layer", "optimizer", "x", "loss"))
    written = [*layer.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    before = [tensor.detach().clone() for tensor in written]
    x.normal_()
    names["graph"].replay()
    replayed = [loss.clone(), *(tensor.detach().clone() for tensor in written)]
    for tensor, value in zip(written, before):
        tensor.detach().copy_(value)
    eager = [names["step"](), *written]
    assert not any(torch.equal(a, b) for a, b in zip(before, written) if a.dim() > 1)
    assert all(torch.equal(a, b) for a, b in zip(replayed, eager))


def options(*command):
    """What `gbmoe COMMAND --help` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    return printed.getvalue()


COMMANDS = [(page, line.partition(" #")[0].strip()) for page in PAGES for block in blocks(page, "bash")
            for line in block.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("page, line", [command for command in COMMANDS if "-m gbmoe" in command[1]],
                         ids=lambda value: page_id(value) if isinstance(value, Path) else value)
def test_commands_of_a_page_exist_with_their_options(page, line):
    words = re.split("[;)]", line.partition("-m gbmoe ")[2])[0].split()  # up to the end of a command, or of $(a command)
    subcommand = words[:2] if words[0] == "bench" and words[1:] and not words[1].startswith("-") else words[:1]
    known = options(*subcommand)
    unknown = [word for word in words if word.startswith("--") and not re.search(rf"(?<![\w-]){word}\b", known)]
    assert not unknown, f"{subcommand} has no {unknown}"


def test_scripts_that_pages_name_are_there():
    named = {(page_id(page), name) for page, line in COMMANDS for name in re.findall(r"(?<!/)\bscripts/[\w./]+", line)}
    assert named and [(page, name) for page, name in sorted(named) if not (ROOT / name).exists()] == []


def test_links_of_pages_lead_somewhere():
    broken = []
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append((page_id(page), target))
    assert broken == []


TEXTS = (".md", ".py", ".cu", ".cuh", ".h", ".cpp", ".sh", ".sbatch", ".toml", ".yml")
# What a build, a run or another package has under such a path.
MADE = re.compile(r"gbmoe/(_C\.so|csrc/|failed/)|docs/_build/")
PATH = re.compile(r"(?<![\w/.-])(?:benchmarks|gbmoe|csrc|scripts|tests|docs|results)/[\w./-]*[\w/]")


def kept_files():
    """What git keeps, except for the log of changes, which names files of its time."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("which files are kept is asked of git, and this is no checkout")
    return [name for name in listed.stdout.split() if name != "CHANGELOG.md" and (ROOT / name).exists()]


def test_files_and_folders_that_pages_and_comments_name_are_there():
    pages = [name for name in kept_files() if name.endswith(TEXTS) and name != "tests/test_wheel.py"]  # whose pages are made up
    named = {(name, path) for name in pages for path in PATH.findall((ROOT / name).read_text())
             if not MADE.match(path) and not path.endswith("_")}  # a name that ends in _ stands for those that begin so
    assert len(named) > 200 and sorted((name, path) for name, path in named if not (ROOT / path).exists()) == []


def test_names_of_gbmoe_that_pages_use_exist(tmp_path):
    names = {(page_id(page), name) for page in PAGES for name in re.findall(r"\bgbmoe(?:\.\w+)+", page.read_text())
             if not name.endswith((".def", ".sif"))}  # files of Apptainer
    with contextlib.ExitStack() as imported_by_adapters:
        for package, adapter in (("torchtitan", "gbmoe.compat.torchtitan"), ("megatron-core", "gbmoe.compat.megatron"),
                                 ("ai2-olmo-core", "gbmoe.compat.olmo_core")):
            imported_by_adapters.enter_context(interfaces.installed(package, adapter, tmp_path))
        assert len(names) > 100 and sorted((page, name) for page, name in names if not resolves(name)) == []


def resolves(name):
    words = name.split(".")
    for count in range(len(words), 0, -1):
        try:
            found = importlib.import_module(".".join(words[:count]))
        except ImportError:
            continue
        for word in words[count:]:
            if not hasattr(found, word):
                return dataclasses.is_dataclass(found) and word in {field.name for field in dataclasses.fields(found)}
            found = getattr(found, word)
        return True
    return False


# What pages name that is another project's, a compiler's or an instruction's.
FOREIGN = {"cache_hint", "compute_90a", "do_bench", "expert_activation", "use_grouped_mm",
           # What DeepEP's dispatch returns.
           "recv_topk_idx",
           # transformers' argument.
           "use_kernels",
           # Options of NCCL's groups.
           "max_ctas", "pg_options",
           # verl's fields and a file of its user's.
           "actor_rollout_ref", "backend_config", "enable_rollout_routing_replay", "external_lib", "gbmoe_in_verl", "override_config",
           "router_replay", "set_replay_data", "target_parameters",
           # Megatron-Core's field and tests, and an argument of OLMo-core.
           "recompute_modules", "test_moe_layer", "test_router_replay", "test_sequential_mlp", "test_shared_experts", "forward_row_offset",
           "test_a2a_token_dispatcher", "test_aux_loss", "test_grad_sync_with_expert_parallel", "test_latent_moe_layer",
           "test_moe_layer_discrepancy", "test_moe_single_grouped_weight_numerics", "test_multihot_indices_converter",
           "test_nemotron_moe_vlm_provider", "test_paged_stashing", "test_qb_routing", "test_router_trace", "test_routers",
           "test_token_dispatcher", "test_cuda_graphs", "test_fine_grained_activation_offloading", "test_model_swap",
           "test_multi_token_prediction", "pipeline_parallel",
           "test_upcycling",
           # torchtitan's tests.
           "test_fsdp_moe_sharding", "test_moe_parallelism"}
SNAKE_CASE = r"\b[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b"


def test_kernels_functions_and_fields_that_pages_name_exist():
    """A note told its reader to profile regex:grouped_kernel, which no kernel's name holds."""
    code = " ".join((ROOT / name).read_text() for name in kept_files() if name.endswith(TEXTS[1:]) and name != "tests/test_docs.py")
    known, missing = set(re.findall(r"\w+", code)), []
    for page in PAGES:
        text = PATH.sub("", page.read_text())
        quoted = {word for quote in re.findall(r"`([^`\n]+)`", text) for word in re.findall(SNAKE_CASE, quote)}
        kernels = set(re.findall(r"\b\w+_kernel\b", text))
        missing += [(page_id(page), word) for word in sorted(quoted | kernels) if word not in known | FOREIGN]
    assert missing == []


def test_the_table_of_expert_parallel_options_has_every_field():
    table = re.findall(r"^\| `(expert_parallel_\w+)` \|", OPTIONS.read_text().partition("## Experts over ranks")[2], re.MULTILINE)
    assert sorted(table) == sorted({"expert_parallel_group", *FLAT_NAMES})


def test_the_first_pages_figures_are_those_of_its_picture():
    """1.07 to 4.5 stood over a picture of 1.06 to 5.91."""
    rows = json.loads((ROOT / "results" / "h200" / "layers.json").read_text())["rows"]
    kept = [f"{row['speedup']:.2f}" for row in rows if row["by"] == "gbmoe-auto" and row["computation"] == "forward+backward"]
    picture = (ROOT / "results" / "h200" / "pictures" / "layers-forward-and-backward-speedup.svg").read_text()
    shown = re.findall(r">([\d.]+)\??</text>", picture)[::3]  # the first of three columns
    assert len(shown) == 10 and set(kept) < set(shown)
    stated = re.search(r"run ([\d.]+) to ([\d.]+) times as fast", (ROOT / "docs" / "index.md").read_text())
    assert stated.groups() == (min(shown, key=float), f"{max(map(float, shown)):.1f}")


def test_pictures_are_small_and_those_kept_are_those_shown():
    shown = {(page.parent / target).resolve() for page in [*PAGES, *(ROOT / "results").rglob("report.md")]
             for target in PICTURE.findall(page.read_text())}
    assert shown and [path.name for path in shown if not path.exists() or path.stat().st_size > 100_000] == []
    kept = subprocess.run(["git", "ls-files", "*.png", "*.svg", "*.jpg", "*.pdf"], cwd=ROOT, capture_output=True, text=True)
    if kept.returncode:
        pytest.skip("which pictures are kept is asked of git, and this is no checkout")
    assert {(ROOT / name).resolve() for name in kept.stdout.split()} == shown


def test_every_note_is_in_one_group_of_the_index_and_says_whether_it_is_in():
    notes = ROOT / "docs" / "notes"
    listed = [re.findall(r"^[\w-]+$", page.read_text(), re.MULTILINE) for page in (notes / "index.md", *sorted(notes.glob("group-*.md")))]
    assert sorted(name for page in listed for name in page) == sorted(path.stem for path in notes.glob("*.md") if path.stem != "index")
    for path in notes.glob("*.md"):
        if path.stem != "index" and not path.stem.startswith("group-"):
            title, _, status = path.read_text().split("\n")[:3]
            assert title.startswith("# ") and re.match(r"\*(In|Not in|A guide)\b", status), path.name
            assert len(title) < 50 and "|---" in path.read_text(), f"{path.name}: a long title, or no table"


def test_the_table_of_arguments_has_every_field_in_order():
    table = OPTIONS.read_text().partition("## Experts over ranks")[0]
    fields = dataclasses.fields(Arguments)
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [field.name for field in fields]
    for field in fields:
        stated = re.search(rf"^\| `{field.name}` \| `([^`]+)` \|", table, re.MULTILINE)
        if stated and isinstance(field.default, (bool, int, float, str)) and field.name != "shared_expert_hidden_size":
            assert stated[1] == repr(field.default).replace("'", '"'), field.name


def test_environment_variables_that_gbmoe_reads_are_in_the_table_of_options():
    """GBMOE_PROGRAMS, by which a fault is narrowed down, stood in no table."""
    read = {name for path in [*(ROOT / "gbmoe").rglob("*.py"), ROOT / "setup.py"]
            for name in re.findall(r"\bGBMOE_[A-Z]+(?:_[A-Z]+)*", path.read_text())}
    listed = set(re.findall(r"`(GBMOE_\w+)`", OPTIONS.read_text()))
    assert len(read) > 5 and read - listed == set()


def test_the_page_of_models_lists_the_model_types_that_convert_takes():
    table = (ROOT / "docs" / "models.md").read_text().partition("## Checkpoints")[2]
    listed = [name for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted({"model_type", *MODEL_TYPES, *WITH_TEXT_CONFIG})
