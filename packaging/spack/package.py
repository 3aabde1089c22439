# A Spack recipe. Put it into a repository of recipes of your own as packages/py-gbmoe/package.py (Spack 1.x: packages/py_gbmoe/package.py),
# `spack repo add` that repository, and tell Spack where the checkout is, since gbmoe has no address that it could be fetched from:
#
#   spack develop --path /path/to/checkout py-gbmoe@main     in an environment
#   spack install py-gbmoe@main +cuda cuda_arch=90 ^py-torch cuda_arch=90

from spack.package import *
from spack_repo.builtin.build_systems.cuda import CudaPackage
from spack_repo.builtin.build_systems.python import PythonPackage


class PyGbmoe(PythonPackage, CudaPackage):
    """The experts of a Mixture-of-Experts layer: grouped GEMMs and fused padded gather/scatter, with MegaBlocks' interface."""

    license("Apache-2.0")

    version("main")

    variant("cuda", default=True, description="Compile the CUDA kernels")
    variant("transformers", default=False, description="Adapters for Hugging Face transformers, and its checkpoints")

    depends_on("cxx", type="build", when="+cuda")
    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-wheel", type="build")
    depends_on("py-torch@2.10:", type=("build", "link", "run"))
    depends_on("py-transformers@5.8:", type=("build", "run"), when="+transformers")
    depends_on("py-safetensors", type=("build", "run"), when="+transformers")

    with when("+cuda"):
        depends_on("cuda@12.5:")
        conflicts("cuda_arch=none", msg="name the GPU: cuda_arch=90 is an H100, 80 an A100")
        for arch in CudaPackage.cuda_arch_values:
            depends_on(f"py-torch+cuda cuda_arch={arch}", when=f"cuda_arch={arch}")
    depends_on("py-torch~cuda", when="~cuda")

    def setup_build_environment(self, env):
        env.set("MAX_JOBS", str(make_jobs))
        env.set("GBMOE_BUILD", "1" if self.spec.satisfies("+cuda") else "0")
        if self.spec.satisfies("+cuda"):
            env.set("CUDA_HOME", self.spec["cuda"].prefix)
            env.set("TORCH_CUDA_ARCH_LIST", ";".join(CudaPackage.compute_capabilities(self.spec.variants["cuda_arch"].value)))

    def test_info(self):
        """The package imports and says what it can run."""
        python("-m", "gbmoe", "info")
