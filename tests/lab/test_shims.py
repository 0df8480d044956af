"""The shims, in a Python of their own as in a lab's environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import surgeon.lab

SHIMS = Path(surgeon.lab.__file__).with_name("shims.py")


def python(folder: Path, code: str, **variables: str) -> str:
    """Run code in a bare Python that imports the shims first, as an environment's .pth line does."""
    (folder / "surgeon_lab_shims.py").write_bytes(SHIMS.read_bytes())
    script = folder / "script.py"
    script.write_text(f"import surgeon_lab_shims\n{code}", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-S", str(script)],
        env={"PATH": "/usr/bin:/bin", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_starting_python_stays_light(tmp_path: Path) -> None:
    """The environment's interpreter also runs surgeon's probes: nothing heavy is imported."""
    heavy = ("torch", "typing", "pathlib", "importlib.resources", "json", "multiprocessing")
    code = f"import sys; print([name for name in {heavy!r} if name in sys.modules])"
    assert python(tmp_path, code) == "[]\n"


def test_every_name_of_the_stand_in_resolves_and_none_can_be_called(tmp_path: Path) -> None:
    """Imports, attributes of names and annotations pass; a call says that it needs a GPU."""
    code = """
import sgl_kernel.deep.down
from sgl_kernel.scalar_type import ScalarType, scalar_types
wanted: ScalarType | None = scalar_types.uint4b8
print(hasattr(sgl_kernel, "__file__"), hasattr(sgl_kernel, "__wrapped__"))
try:
    sgl_kernel.fused_experts(1)
except RuntimeError as error:
    print(error)
"""
    assert python(tmp_path, code) == "False False\nsgl_kernel.fused_experts needs a GPU; this is surgeon's CPU lab\n"


def test_a_real_kernel_package_wins(tmp_path: Path) -> None:
    """Where sgl_kernel is installed the stand-in stays out of the way."""
    (tmp_path / "sgl_kernel.py").write_text("real = 'yes'\n", encoding="utf-8")
    assert python(tmp_path, "import sgl_kernel; print(sgl_kernel.real)") == "yes\n"


def test_modules_are_completed_only_where_something_is_missing(tmp_path: Path) -> None:
    """torch.cpu gets the question that sglang's recorder asks; one that has it keeps its own."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "cpu.py").write_text("", encoding="utf-8")
    ask = "import torch.cpu; print(torch.cpu.is_current_stream_capturing(), torch.cpu.__spec__.loader)"
    assert python(tmp_path, ask).startswith("False <_frozen_importlib_external.SourceFileLoader")
    (package / "cpu.py").write_text("def is_current_stream_capturing(): return 'own'\n", encoding="utf-8")
    assert python(tmp_path, ask).startswith("own ")


READERS = """
import io, multiprocessing, os, pathlib, sys

def read(path, queue):
    answers = []
    for way in (open, io.open, lambda p: os.close(os.open(p, os.O_RDONLY)), lambda p: pathlib.Path(p).read_text()):
        try:
            way(path)
            answers.append("read")
        except PermissionError:
            answers.append("refused")
    queue.put((multiprocessing.current_process().name, answers))

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    queue = multiprocessing.Queue()
    for _ in range(2):
        child = multiprocessing.Process(target=read, args=(sys.argv[0], queue))
        child.start()
        child.join()
    import json
    print(json.dumps(sorted(queue.get() for _ in range(2))))
"""


@pytest.mark.parametrize(("fault", "second"), [("script.py", "refused"), ("other.py", "read")])
def test_a_fault_makes_one_file_unreadable_in_one_process(tmp_path: Path, fault: str, second: str) -> None:
    """The second process is refused files of that name in every way of opening them; the first reads on."""
    faults = tmp_path / "faults.json"
    faults.write_text(json.dumps({"unreadable": {"name": fault, "process": 2}}), encoding="utf-8")
    answers = json.loads(python(tmp_path, READERS, SURGEON_LAB_FAULTS=str(faults)))
    assert answers == [["Process-1", ["read"] * 4], ["Process-2", [second] * 4]]


def test_without_a_faults_file_everything_reads(tmp_path: Path) -> None:
    """The variable alone does nothing."""
    answers = json.loads(python(tmp_path, READERS, SURGEON_LAB_FAULTS=str(tmp_path / "absent.json")))
    assert [ways for _, ways in answers] == [["read"] * 4] * 2
