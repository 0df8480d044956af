"""A package ``sglang`` as an installer would lay it out, and as much of what it requires as surgeon looks at."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import shutil
from pathlib import Path

LAUNCHER = Path(__file__).with_name("fake_launch_server.py")
BENCH = Path(__file__).with_name("fake_bench_serving.py")

# Enough of the real one for tests that only move its bytes about.
TOPK = b'''"""Chooses experts."""


def select_experts(hidden_states, router_logits, topk_config, *, num_token_non_padded=None):
    topk_weights, topk_ids = fused_topk(hidden_states, router_logits, topk_config.top_k)
    get_global_expert_distribution_recorder().on_select_experts(topk_ids=topk_ids)
    return StandardTopKOutput(topk_weights, topk_ids, router_logits)
'''

METADATA = """Metadata-Version: 2.4
Name: sglang
Version: {version}
Requires-Python: >=3.10
License:                                  Apache License
        
        Version: 99.9 of the licence, which is no field
Requires-Dist: transformers==4.57.1
Requires-Dist: torch==2.9.1
Requires-Dist: pytest; extra == "test"

# sglang
Requires-Dist: not-a-field
"""  # noqa: W293 - METADATA of 0.5.9 has such lines


def install_package(
    site: Path,
    *,
    topk: bytes = TOPK,
    runner: bytes | None = None,
    version: str = "0.5.9",
    record: bool = True,
    dist_info: bool = True,
) -> Path:
    """Lay out a package ``sglang`` and its dist-info as an installer would; return the package's folder.

    Args:
        site: the site-packages folder.
        topk: the bytes of topk.py.
        runner: those of model_runner.py; None for a release without one.
        version: what METADATA says.
        record: whether there is a RECORD.
        dist_info: whether there is a dist-info at all.
    """
    package = site / "sglang"
    moe = package / "srt" / "layers" / "moe"
    moe.mkdir(parents=True)
    files = {package / "launch_server.py": LAUNCHER.read_bytes(), moe / "topk.py": topk}
    files[package / "bench_serving.py"] = BENCH.read_bytes()
    for folder in (package, package / "srt", package / "srt" / "layers", moe):
        files[folder / "__init__.py"] = b""
    if runner is not None:
        executor = package / "srt" / "model_executor"
        executor.mkdir()
        files |= {executor / "__init__.py": b"", executor / "model_runner.py": runner}
    files[package / "_version.py"] = f'__version__ = "{version}"\n'.encode()
    if dist_info:
        info = site / f"sglang-{version}.dist-info"
        info.mkdir()
        files[info / "METADATA"] = METADATA.format(version=version).encode()
        files[info / "INSTALLER"] = b"pip\n"
        if record:
            files[info / "RECORD"] = _record(site, files)
    for path, content in files.items():
        path.write_bytes(content)
    return package


# What sglang of METADATA asks for: the versions, and as much of transformers as builds a config object.
TRANSFORMERS = """import json, os
__version__ = "{version}"


class AutoConfig:
    @staticmethod
    def from_pretrained(path, trust_remote_code=False, local_files_only=False):
        with open(os.path.join(path, "config.json")) as file:
            known = json.load(file)
        if known["model_type"] not in {knows!r}:
            raise KeyError(known["model_type"])
        return AutoConfig()
"""


def install_companions(
    site: Path, *, transformers: str = "4.57.1", knows: tuple[str, ...] = ("glm4_moe",), torch: str = "2.9.1"
) -> None:
    """Lay out stand-ins for what sglang requires; called again, it replaces them, as an installer would.

    Args:
        site: the site-packages folder.
        transformers: its version.
        knows: the model types that it can build a config of.
        torch: the version of torch, of which there is only the dist-info.
    """
    for name, version in (("transformers", transformers), ("torch", torch)):
        for old in site.glob(f"{name}-*.dist-info"):
            shutil.rmtree(old)
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        (info / "INSTALLER").write_text("pip\n", encoding="utf-8")
    code = TRANSFORMERS.format(version=transformers, knows=knows)
    (site / "transformers").mkdir(exist_ok=True)
    (site / "transformers" / "__init__.py").write_text(code, encoding="utf-8")


def _record(site: Path, files: dict[Path, bytes]) -> bytes:
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        writer.writerow([path.relative_to(site).as_posix(), f"sha256={digest}", len(content)])
    return table.getvalue().encode()
