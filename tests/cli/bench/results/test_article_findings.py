"""The article's findings get the verdict that the rows support, and none where there is nothing to judge by."""

import pytest

from gbmoe.cli.bench.results import article_findings
from gbmoe.testing import moe_shapes
from tests.cli.bench.rows import content, layer_row, losses_row, product_row

KERNEL = "gbmoe-cublas_loop"
YES, NO = "reproduced", "does not reproduce"


def verdict(rows, words):
    """The verdict of the one finding whose text holds `words`."""
    found, = [finding for finding in article_findings.findings(content("article", rows)) if words in finding.article]
    return found


def capped(by, failing=()):
    """An implementation that fails on some of the article's cases in 16 GiB."""
    return [layer_row(case, by, memory_limit=16, outcome="out of memory" if case in failing else "verified")
            for case in moe_shapes.NYU_CASES]


def test_without_rows_nothing_is_judged():
    found = article_findings.findings(content("article", []))
    assert found and {finding.verdict for finding in found} == {"not measured"}


@pytest.mark.parametrize("failing, expected", [(5, YES), (0, NO), (17, NO)])
def test_share_of_torch_bmm(failing, expected):
    small = [case for case in moe_shapes.NYU_CASES if case.hidden < 8192]
    found = verdict(capped("bmm", small[:failing]), "70 %")
    assert found.verdict == expected and f"{17 - failing} of 17" in found.measured
    assert ("out of memory: " in found.measured) == bool(failing)


def test_the_case_that_the_article_could_not_run_does_not_count():
    beyond = [case for case in moe_shapes.NYU_CASES if case.hidden == 8192]
    found = verdict(capped(KERNEL, beyond), f"Its own implementation passes all cases (here {KERNEL})")
    assert found.verdict == YES and "17 of 17" in found.measured and "64x1024x8192-e8k8" in found.measured
    found = verdict(capped(KERNEL, [moe_shapes.NYU_LARGEST_CASE]), "Its own implementation passes")
    assert found.verdict == NO


@pytest.mark.parametrize("theirs, faster, slower", [(2e-3, YES, NO), (5e-4, NO, YES)])
def test_speed_is_the_article_kernels(theirs, faster, slower):
    case = moe_shapes.NYU_CASES[0]
    rows = [layer_row(case, KERNEL, 1e-3), layer_row(case, "gbmoe-auto", 1e-9), layer_row(case, "bmm", theirs),
            layer_row(case, "megablocks-grouped", theirs)]
    found = verdict(rows, "faster than torch.bmm")
    assert found.verdict == faster and f"{KERNEL} {theirs / 1e-3:.2f} times as fast" in found.measured
    assert verdict(rows, "slower than MegaBlocks grouped").verdict == slower
    assert verdict(rows, "faster than MegaBlocks sparse").verdict == "not measured"


@pytest.mark.parametrize("uneven, expected", [(0.9e-3, YES), (0.999e-3, NO), (1.1e-3, NO)])
def test_an_uneven_split_must_be_faster_beyond_the_noise(uneven, expected):
    rows = [product_row(KERNEL, "equal", 1e-3), product_row(KERNEL, "uneven", uneven)]
    assert verdict(rows, "uneven split").verdict == expected


@pytest.mark.parametrize("problem, expected", [("CUDA error: an illegal memory access was encountered", YES),
                                               ("no result in 300 s", NO)])
def test_the_triton_failure(problem, expected):
    rows = [layer_row(moe_shapes.NYU_TRITON_CASE, "megablocks-sparse", outcome="crashed", problem=problem)]
    found = verdict(rows, "Triton")
    assert found.verdict == expected and problem in found.measured
    assert verdict([layer_row(moe_shapes.NYU_TRITON_CASE, "megablocks-sparse", 1e-3)], "Triton").verdict == NO


def test_losses_are_held_against_torch_bmms():
    rows = [losses_row("bmm", [1.0, 0.9]), losses_row("gbmoe-auto", [1.0001, 0.95])]
    assert verdict(rows, "The loss is that").verdict == YES
    found = verdict(rows, "The loss after backward")
    assert found.verdict == NO and "5.6e-02" in found.measured


def test_rows_that_belong_to_no_finding_are_no_error():
    beyond = [layer_row(case, "bmm", 1e-3) for case in moe_shapes.NYU_CASES if case.hidden == 8192]
    assert verdict(beyond, "70 %").verdict == "not measured"
    assert verdict([product_row(KERNEL, way, 1e-3) for way in ("equal", "other")], "uneven split").verdict == "not measured"
    assert verdict([losses_row("bmm", [0.0, 0.0]), losses_row(KERNEL, [1.0, 1.0])], "The loss is").verdict == NO


def test_the_suite_ends_with_its_findings(bench, monkeypatch, capsys):
    monkeypatch.setattr(moe_shapes, "NYU_CASES", (moe_shapes.NYU_TRITON_CASE,))
    status, found, rows = bench("--engines", "auto", suite="article", peers="bmm")
    assert status == 0
    assert {row["kind"] for row in rows.values()} == {"layer", "product", "training"}
    assert all(row["verified"] for row in rows.values())
    assert all((row["median"] is not None) == (row["memory_limit"] is None) for row in rows.values()
               if row["kind"] == "layer" and "median" in row)
    by_text = {finding["article"]: finding["verdict"] for finding in found["findings"]}
    for text in ("The loss is that of torch.bmm.", "The loss after backward is that of torch.bmm."):
        assert by_text[text] == YES
    assert "REPRODUCED: The loss is that of torch.bmm." in capsys.readouterr().out
