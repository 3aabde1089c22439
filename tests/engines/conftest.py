"""The kernels on the emulated GPU, which two files of tests run."""

import shutil

import pytest

from tests.engines import emulated_gpu


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("the emulated GPU needs g++")
    return emulated_gpu.Kernels(tmp_path_factory.mktemp("emulated_gpu"))
