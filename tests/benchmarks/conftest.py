"""The fixtures of gbmoe/cli/bench's tests."""

from tests.cli.bench.conftest import bench, one_case, quick  # noqa: F401
