"""Packaging: the directories `triton_kernels/` and `configs/` are packaged inside `dsq_ckpt`.

`triton_kernels` keeps its place at the top level of the repository, but another project installs a
top-level module of that name, so here it becomes `dsq_ckpt.triton_kernels`.
"""

import hashlib
import re
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent
URL = ""
"""Where the repository's files are shown, such as https://host/owner/dsq_ckpt/blob/main; empty while it is nowhere."""


def description(text: str) -> str:
    """Return a README as a package index can show it: links to files and pictures lead to `URL`, or become text."""
    link = r"(!?)\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)"
    return re.sub(link, rf"\1[\2]({URL}/\3)" if URL else r"\2", text)



packages = find_packages(include=["dsq_ckpt", "dsq_ckpt.*"])
package_dir: dict[str, str] = {}
package_data = {"dsq_ckpt": ["py.typed"], "dsq_ckpt.report": ["templates/*"]}
if (ROOT / "triton_kernels" / "__init__.py").exists():
    nested = find_packages("triton_kernels")
    packages += ["dsq_ckpt.triton_kernels", *(f"dsq_ckpt.triton_kernels.{name}" for name in nested)]
    package_dir["dsq_ckpt.triton_kernels"] = "triton_kernels"
if (ROOT / "configs").is_dir():
    packages.append("dsq_ckpt.configs")
    package_dir["dsq_ckpt.configs"] = "configs"
    package_data["dsq_ckpt.configs"] = ["**/*.json", "**/*.yaml"]

# A plain library without Python's headers, which dsq_ckpt/native/__init__.py loads. Where there is no C compiler, Numba
# does the same, more slowly.
native = "dsq_ckpt/native"
texts = [file.read_bytes() for file in sorted((ROOT / native).glob("*.[ch]"))]
sources = hashlib.sha256(b"".join(texts)).hexdigest()[:16]
_NAMES = (
    "lanes", "model", "plain", "avx2", "avx512", "words_avx512", "changes", "changes_avx2", "changes_avx512", "values",
    "scales", "quantize", "moments", "sketches", "codebooks",
)
coder = Extension(
    "dsq_ckpt.native._compiled",
    [f"{native}/{name}.c" for name in _NAMES],
    depends=[f"{native}/{name}.h" for name in ("lanes", "paths", "bins", "changes", "changes_x86")],
    define_macros=[("DSQ_SOURCES", f'"{sources}"')],  # with which native/__init__.py knows a library of other sources
    # No result depends on the last two: without `errno` roots are instructions, not calls, and where nobody asks which
    # quotients were invalid, these may be computed before the choice between them and others.
    extra_compile_args=[
        "-O3", "-g0", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    ],
    libraries=["m"],
    py_limited_api=not sysconfig.get_config_var("Py_GIL_DISABLED"),  # one library for all versions
    optional=True,
)

# A wheel for all versions of Python; free-threaded ones have no limited API.
options = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp310"}}

# What torch's own wheels for GPUs ask for too; there is none for other systems.
triton = 'triton; platform_system == "Linux"'

documentation = ["sphinx", "myst-parser", "furo"]

version = re.search(r'__version__ = "(.+)"', (ROOT / "dsq_ckpt" / "version.py").read_text(encoding="utf-8"))
assert version, "dsq_ckpt/version.py has no __version__"
readme = ROOT / "README.md"

setup(
    name="dsq_ckpt",
    version=version[1],
    description="Small training checkpoints for PyTorch: sketched quantization and delta coding inside DCP",
    long_description=description(readme.read_text(encoding="utf-8")) if readme.exists() else "",
    long_description_content_type="text/markdown",
    author="dsq_ckpt authors",
    license="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=packages,
    package_dir=package_dir,
    package_data=package_data,
    ext_modules=[coder],
    options=options,
    entry_points={"console_scripts": ["dsq = dsq_ckpt.cli:main"]},
    install_requires=[
        "torch>=2.10",
        "numpy",
        "numba",
        "pydantic>=2",
        "typer",
        "rich",
        "jinja2",
        "xxhash",
        "zstandard",
        "pyyaml",
    ],
    extras_require={
        "safetensors": ["safetensors"],  # for dsq_ckpt.compress of such files
        "deepspeed": ["deepspeed"],
        "lightning": ["lightning>=2.6"],
        "huggingface": ["transformers>=5.3", "accelerate>=1.10"],
        "torchtitan": ["torchtitan>=0.3"],
        "torchft": ["torchft>=0.2"],
        "mpi": ["mpi4py"],  # for dsq_ckpt.compress by the ranks of an MPI job, whose library it finds
        "plot": ["matplotlib"],  # for scripts/evaluate.py report
        "remote": ["fsspec", "s3fs"],  # for s3:// paths; gcsfs (gs://) and adlfs (az://) are installed by themselves
        "gpu": [triton],  # where torch does not bring it along
        "docs": documentation,  # for `make docs`
        "dev": [
            "matplotlib",
            "pytest",
            "pytest-cov",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ddsketch",
            "kmeans1d",
            "safetensors",
            "deepspeed",
            "ninja",  # DeepSpeed builds its extensions with it
            "transformers",
            "accelerate",
            "lightning",
            "torchft",
            "ray[train]",
            "tyro",  # what torchtitan needs, which the Makefile installs without the rest of its dependencies
            "torchdata",
            "fsspec",
            "s3fs",
            "moto[server]",  # a server of S3 for tests
            "tensorboard",  # reads what the callable of dsq_ckpt.report.scalars wrote
            "wandb",
            "mlflow-skinny",
            "mpi4py",
            "mpich",  # an MPI of the tests' own: it starts in a fifth of a second, as root and without a network too
            triton,
            "ruff",
            "mypy",
            "import-linter",
            "types-PyYAML",
            *documentation,
        ],
    },
)
