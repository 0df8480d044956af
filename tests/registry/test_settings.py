"""Which index an environment uses, by pip's and uv's own rules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from surgeon.registry import settings

SITE = "https://site.example/simple"
USER = "https://user.example/simple"
UV = "https://uv.example/simple"


def write(path: Path, text: str) -> None:
    """Write a file, its folders too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def looked(home: Path, prefix: Path, path: tuple[Path, ...] = (), **environ: str) -> tuple[str, str]:
    """Index and what names it."""
    variables = {"HOME": str(home), "XDG_CONFIG_DIRS": str(home / "none"), **environ}
    found = settings.look(variables, str(prefix), [str(one) for one in path])
    return found["url"], found["source"]


def test_nothing_said_is_pypi(tmp_path: Path) -> None:
    """As pip and uv have it."""
    assert looked(tmp_path, tmp_path) == ("https://pypi.org/simple", "")


def test_pip_s_files_go_from_the_machine_to_the_environment(tmp_path: Path) -> None:
    """The environment's own file beats the user's, a named file beats it, a variable beats all."""
    home, prefix = tmp_path / "home", tmp_path / "venv"
    user, site, named = home / ".config/pip/pip.conf", prefix / "pip.conf", tmp_path / "named.conf"
    write(user, f"[global]\nindex-url = {USER}\ncert = /c.pem\n")
    assert looked(home, prefix) == (USER, str(user))
    write(site, f"[install]\nindex_url = {SITE}\n")
    assert looked(home, prefix) == (SITE, str(site))
    write(named, "[global]\nindex-url = https://named.example/simple\n")
    assert looked(home, prefix, PIP_CONFIG_FILE=str(named))[1] == str(named)
    assert looked(home, prefix, PIP_CONFIG_FILE="/dev/null") == ("https://pypi.org/simple", "")
    assert looked(home, prefix, PIP_INDEX_URL="https://v/simple") == ("https://v/simple", "PIP_INDEX_URL")
    reach = settings.look({"HOME": str(home), "PIP_NO_INDEX": "1"}, str(prefix), [])
    assert reach["reach"] == {"cert": "/c.pem"}
    assert reach["no_index"] is True


@pytest.mark.parametrize(
    "text",
    [
        f'index-url = "{UV}"\n',
        f"[pip]\nindex-url = '{UV}'\n",
        f'[[index]]\nurl = "https://extra.example"\n\n[[index]]\nname = "mine"\nurl = "{UV}"\ndefault = true\n',
    ],
)
def test_uv_s_file_in_each_of_its_spellings(tmp_path: Path, text: str) -> None:
    """The default index counts, not another that is looked at first."""
    write(tmp_path / ".config/uv/uv.toml", text)
    assert looked(tmp_path, tmp_path)[0] == UV
    write(tmp_path / ".config/uv/uv.toml", text.replace("default = true", "explicit = true").replace("index-url", "x"))
    assert looked(tmp_path, tmp_path)[0] == "https://pypi.org/simple"


def test_the_tool_that_installed_sglang_counts_first(tmp_path: Path) -> None:
    """An environment that uv made is not what pip's settings say, where uv's say something."""
    installer = tmp_path / "site-packages/sglang-0.5.9.dist-info/INSTALLER"
    site = (installer.parent.parent,)
    both = {"PIP_INDEX_URL": SITE, "UV_DEFAULT_INDEX": f"mine={UV}"}
    write(installer, "pip\n")
    assert looked(tmp_path, tmp_path, site, **both) == (SITE, "PIP_INDEX_URL")
    write(installer, "uv\n")
    assert looked(tmp_path, tmp_path, site, **both) == (UV, "UV_DEFAULT_INDEX")
    assert looked(tmp_path, tmp_path, site, PIP_INDEX_URL=SITE) == (SITE, "PIP_INDEX_URL")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:secret@host:8443/simple/", "https://host:8443/simple/"),
        ("https://token@host/simple?key=secret#x", "https://host/simple"),
        ("https://u:p%40ss@[::1]:80/s", "https://[::1]:80/s"),
        ("https://host/simple", "https://host/simple"),
    ],
)
def test_credentials_are_taken_out_of_an_address(url: str, shown: str) -> None:
    """Name, password and whatever a query carries."""
    assert settings.without_credentials(url) == shown


def test_what_is_sent_to_a_node_runs_alone_and_keeps_secrets(tmp_path: Path) -> None:
    """The file's text is all that the node's interpreter gets; credentials are not in what comes back."""
    source = Path(settings.__file__).read_text("utf-8")
    environ = {"HOME": str(tmp_path), "PIP_INDEX_URL": "https://user:secret@host/simple"}
    done = subprocess.run([sys.executable, "-I", "-c", source], env=environ, capture_output=True, text=True, check=True)
    assert "secret" not in done.stdout + done.stderr
    said = json.loads(done.stdout.removeprefix(settings.MARK))
    assert said == {"url": "https://host/simple", "source": "PIP_INDEX_URL"}


def test_it_parses_as_python_3_8() -> None:
    """A node's interpreter may be as old as the agent allows, and has nothing but the standard library."""
    import ast

    tree = ast.parse(Path(settings.__file__).read_bytes(), feature_version=(3, 8))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {str(name).partition(".")[0] for name in imported} <= sys.stdlib_module_names
