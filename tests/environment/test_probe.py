"""Whether the served model's config builds: the probe's code in a real interpreter, with a stand-in transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surgeon.environment.checks import Severity
from surgeon.environment.probe import CODE, MARK, judge_probe, read_probe

if TYPE_CHECKING:
    from pathlib import Path

    from surgeon.environment.checks import Check

# As transformers behaves: a mapping of known model types, a KeyError inside, a ValueError with advice outside.
TRANSFORMERS = """
import json, os
__version__ = "4.57.1"

class Qwen3MoeConfig:
    pass

class DeepseekV3Config:
    def __init__(self, layer_types):
        for kind in layer_types:
            if kind != "full_attention":
                raise ValueError(f"layer_types: {kind} is not one of full_attention")

class AutoConfig:
    @classmethod
    def from_pretrained(cls, path, trust_remote_code=False, local_files_only=False):
        assert local_files_only
        with open(os.path.join(path, "config.json")) as file:
            config = json.load(file)
        kind = config["model_type"]
        if kind == "own_code" and not trust_remote_code:
            raise ValueError("loading this model needs trust_remote_code=True")
        if kind in ("qwen3_moe", "own_code"):
            return Qwen3MoeConfig()
        if kind == "deepseek_v3":
            return DeepseekV3Config(config["layer_types"])
        raise ValueError(
            f"The checkpoint you are trying to load has model type `{kind}` but Transformers does not recognize this "
            "architecture."
        ) from KeyError(kind)
"""

# sglang's own loader registers configs that transformers does not have.
SGLANG_LOADER = """
class GlmMoeDsaConfig:
    pass

def get_config(path, trust_remote_code):
    import json, os
    with open(os.path.join(path, "config.json")) as file:
        kind = json.load(file)["model_type"]
    if kind != "glm_moe_dsa":
        raise KeyError(kind)
    return GlmMoeDsaConfig()
"""

DYING = """
import os, sys
print("Illegal instruction", file=sys.stderr, flush=True)
os._exit(132)
"""


class Site:
    """A folder of stand-in packages, and the probe run with it on the import path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("transformers/__init__.py", TRANSFORMERS)

    def write(self, path: str, text: str) -> None:
        """Put a file there, and make every folder above it a package."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        for parent in target.relative_to(self.folder).parents[:-1]:
            (self.folder / parent / "__init__.py").touch()
        target.write_text(text, encoding="utf-8")

    def probe(self, model_type: str, *, trust: bool = False, **config: object) -> Check:
        """Run CODE as the agent runs it on a model of that type, and judge what it said."""
        model = self.folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps({"model_type": model_type, **config}), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(model), "1" if trust else "0"],
            env={**os.environ, "PYTHONPATH": str(self.folder)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        said = read_probe(done.stdout, done.stderr, done.returncode)
        return judge_probe(said, model="/models/served", model_type=model_type)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A site with a transformers that knows two model types."""
    return Site(tmp_path)


def test_a_known_model_type_builds_and_says_by_whom(site: Site) -> None:
    """The evidence names the transformers that was really imported, and from where."""
    check = site.probe("qwen3_moe")
    assert (check.id, check.severity) == ("model-config", Severity.OK)
    assert check.title == "Qwen3MoeConfig of /models/served builds (by transformers.AutoConfig)"
    assert check.evidence == (f"transformers 4.57.1 from {site.folder}/transformers/__init__.py",)


def test_an_unknown_model_type_fails_with_the_version_and_the_way_out(site: Site) -> None:
    """The advice installs without dependencies, which would move other packages, and then records it."""
    check = site.probe("glm_moe_dsa")
    assert check.severity is Severity.FAIL
    assert "/models/served" in check.title
    assert "glm_moe_dsa" in check.title
    assert "does not recognize" in check.evidence[-1]
    for words in ("transformers 4.57.1", "--no-deps", "--save"):
        assert words in check.advice


@pytest.mark.parametrize("module", ["sglang/srt/utils/hf_transformers_utils.py", "sglang/srt/hf_transformers_utils.py"])
def test_a_type_that_sglang_itself_brings_builds_by_its_loader(site: Site, module: str) -> None:
    """Transformers alone does not know it, and yet the server would start: asked at the loader's new and old place."""
    site.write(module, SGLANG_LOADER)
    check = site.probe("glm_moe_dsa")
    assert check.severity is Severity.OK
    name = module.removesuffix(".py").replace("/", ".")
    assert check.title == f"GlmMoeDsaConfig of /models/served builds (by {name}.get_config)"


def test_a_type_that_neither_knows_fails_with_the_loaders_word(site: Site) -> None:
    """The last one asked is the one that the server asks; its KeyError is read as an unknown type."""
    site.write("sglang/srt/utils/hf_transformers_utils.py", SGLANG_LOADER)
    check = site.probe("glm9")
    assert check.severity is Severity.FAIL
    assert check.evidence[-1] == "KeyError: 'glm9'"
    assert "does not know this model type" in check.advice


def test_a_known_type_with_an_unknown_layer_type_fails(site: Site) -> None:
    """Grepping for the model type would say yes; building the object says what the server would say."""
    assert site.probe("deepseek_v3", layer_types=["full_attention"]).severity is Severity.OK
    check = site.probe("deepseek_v3", layer_types=["full_attention", "sparse_attention"])
    assert check.severity is Severity.FAIL
    assert "sparse_attention" in check.evidence[-1]


def test_remote_code_is_trusted_only_if_the_server_does(site: Site) -> None:
    """The flag of the server's command line is the probe's too."""
    assert site.probe("own_code", trust=True).severity is Severity.OK
    assert site.probe("own_code").severity is Severity.FAIL


@pytest.mark.parametrize(
    "broken", ["import no_such_kernel_module", "raise OSError('libcudart.so.13: cannot open')", "raise SystemExit(3)"]
)
def test_a_transformers_that_does_not_import_fails_as_such(site: Site, broken: str) -> None:
    """Not a matter of the model: the advice is to reinstall transformers itself."""
    site.write("transformers/__init__.py", broken)
    check = site.probe("qwen3_moe")
    assert check.severity is Severity.FAIL
    assert check.evidence[-1]
    assert "does not import" in check.advice


def test_an_interpreter_that_dies_leaves_its_last_words(site: Site) -> None:
    """A native library may end the process: what stood last on standard error is the reason."""
    site.write("transformers/__init__.py", DYING)
    check = site.probe("qwen3_moe")
    assert check.severity is Severity.FAIL
    assert check.evidence == ("Illegal instruction",)


def test_noise_around_the_answer_does_no_harm(site: Site) -> None:
    """Packages print at import and at exit, with and without an end of line, and even the probe's own mark."""
    noise = f"""
import atexit, sys
print("loading ...")
print("{MARK}not json")
print("{MARK}[]")
atexit.register(lambda: print("\\n{MARK}{{torn"))
atexit.register(lambda: print("bye"))
"""
    site.write("transformers/__init__.py", TRANSFORMERS + noise + 'sys.stdout.write("no end of line")\n')
    assert site.probe("qwen3_moe").severity is Severity.OK


@given(stdout=st.text(), stderr=st.text(), returncode=st.integers(-15, 255))
def test_output_without_an_answer_is_a_failure_with_a_reason(stdout: str, stderr: str, returncode: int) -> None:
    """Whatever was printed instead: no exception, never a pass, and something to read."""
    said = read_probe(stdout, stderr, returncode)
    check = judge_probe(said, model="m", model_type="")
    assert check.severity is Severity.FAIL
    assert check.evidence[-1]
