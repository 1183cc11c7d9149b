"""Packaging: `layouts`, `models` and `lowering` are real folders here, and links inside `meshdsl/`.

The links make `meshdsl` one ordinary package tree: editable installs, wheels, type checkers and a
bare checkout all see the same modules, and two checkouts never mix.
"""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
DOCS = ["mkdocs-material>=9.6,<10", "mkdocstrings[python]>=0.29"]
SERVE = ["jinja2>=3.1.6", "starlette>=1.0", "uvicorn>=0.40"]

setup(
    name="meshdsl",
    version=runpy.run_path(str(ROOT / "meshdsl" / "version.py"))["VERSION"],
    description="Named-dimension tensor programs, laid out on device meshes by one line.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE"],
    author="The meshdsl authors",
    keywords=["machine learning", "distributed training", "named tensors", "TPU", "JAX"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["meshdsl", "meshdsl.*"]),
    # Static tools do not follow the import hooks of setuptools' default editable mode.
    options={"editable_wheel": {"mode": "compat"}},
    package_data={
        "meshdsl": ["py.typed"],
        "meshdsl.cli.help_pages": ["*.txt"],
        "meshdsl.layouts": ["tables/*.json"],
        "meshdsl.reports.explain.html": ["*.css", "*.js"],
        "meshdsl.reports.explore": ["*.css", "*.js"],
        "meshdsl.reports.notebook": ["*.css"],
    },
    install_requires=[
        "jax>=0.10,<0.12",
        "numpy>=2.0",
        "absl-py>=2.1",
        "rich>=13.7",
        "grain>=0.2.18",
        "orbax-checkpoint>=0.12",
        "tensorboardX>=2.6.2",
        "safetensors>=0.8",
    ],
    extras_require={
        "gpu": ["jax[cuda12]>=0.10,<0.12"],
        "tf": ["tensorflow>=2.18"],
        "data": ["pyarrow>=18", "tokenizers>=0.21"],
        "tpu": ["libtpu>=0.0.42"],
        "plot": ["matplotlib>=3.9"],
        "serve": [*SERVE],
        "lm_eval": ["lm_eval>=0.4.9"],
        "hf": ["tokenizers>=0.21", "torch>=2.6", "transformers>=5"],  # the judge of our tests
        "docs": DOCS,
        "test": [
            *DOCS,
            *SERVE,
            "basedpyright>=1.29",
            "equinox>=0.13",
            "flax>=0.12",
            "hypothesis>=6.100",
            "ipykernel>=6.29",
            "keras-hub>=0.32",
            "matplotlib>=3.9",
            "mypy>=1.15",
            "nbclient>=0.10",
            "optax>=0.2.8",
            "pyarrow>=18",
            "pytest>=8.3",
            "pytest-xdist>=3.6",
            "qwix>=0.1.8",
            "ruff>=0.11",
            "scikit-learn>=1.5",
            "setuptools>=77",
            "tensorflow>=2.18",
            "tokenizers>=0.21",
        ],
    },
    entry_points={"console_scripts": ["meshdsl = meshdsl.cli.main:console"]},
)
