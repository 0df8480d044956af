"""Which package index an environment uses, read from pip's and uv's settings; runs here and on a node.

It is sent to the node as text and run there by the server's interpreter, so it needs nothing but the standard library
of Python 3.8. Sources: pip's documentation, "Configuration"; uv's documentation, "Configuration files" and "Package
indexes".
"""

from __future__ import annotations

import configparser
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

PYPI = "https://pypi.org/simple"
MARK = "SURGEON-INDEX:"

# What pip needs to reach an index, besides its address.
_REACH = ("cert", "client-cert", "proxy", "trusted-host", "keyring-provider")
_SECTIONS = ("global", "index", "download", "install")


def _home(environ: dict[str, str]) -> tuple[Path, Path]:
    """The home directory, and the folder for settings in it."""
    home = Path(environ.get("HOME") or Path.home())
    return home, Path(environ.get("XDG_CONFIG_HOME") or home / ".config")


def _config_files(environ: dict[str, str], prefix: str) -> list[Path]:
    """Pip's configuration files, the ones that count less first."""
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home, config = _home(environ)
    shared = (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
    files = [*(Path(folder, "pip", "pip.conf") for folder in shared), Path("/etc/pip.conf")]
    files += [home / ".pip" / "pip.conf", config / "pip" / "pip.conf", Path(prefix, "pip.conf")]
    return [*files, Path(named)] if named else files


def _pip(environ: dict[str, str], prefix: str) -> dict[str, tuple[str, str]]:
    """Pip's settings by name, each with where it stands."""
    found: dict[str, tuple[str, str]] = {}
    for file in _config_files(environ, prefix):
        parser = configparser.RawConfigParser()
        try:
            parser.read(str(file), encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        for section in _SECTIONS:
            if parser.has_section(section):
                for name, value in parser.items(section):
                    found[name.replace("_", "-")] = (value.strip(), str(file))
    for name, value in environ.items():
        if name.startswith("PIP_") and value:
            found[name[len("PIP_") :].lower().replace("_", "-")] = (value, name)
    return found


def _uv(environ: dict[str, str]) -> tuple[str, str] | None:
    """The index of uv, with where it is named."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        if environ.get(name):
            # An index may bear a name: NAME=URL.
            return re.sub(r"^[\w.-]+=(?=[a-z+]+://)", "", environ[name]), name
    user = Path(environ.get("UV_CONFIG_FILE") or _home(environ)[1] / "uv" / "uv.toml")
    for file in (user, Path("/etc/xdg/uv/uv.toml"), Path("/etc/uv/uv.toml")):
        try:
            url = _in_toml(file.read_text("utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        if url:
            return url, str(file)
    return None


def _in_toml(text: str) -> str | None:
    """The default index of a uv.toml, by its lines: Python 3.8 to 3.10 read no TOML."""
    blocks = re.split(r"^\s*\[", text, flags=re.MULTILINE)
    for block in blocks:
        url = re.search(r"""^\s*(?:index-)?url\s*=\s*["']([^"']+)["']""", block, re.MULTILINE)
        top = block is blocks[0] or block.startswith("pip]")
        if top:
            url = re.search(r"""^\s*index-url\s*=\s*["']([^"']+)["']""", block, re.MULTILINE)
        elif not (block.startswith("[index]]") and re.search(r"^\s*default\s*=\s*true", block, re.MULTILINE)):
            url = None
        if url:
            return url.group(1)
    return None


def _installer(path: list[str]) -> str:
    for folder in path:
        for file in sorted(Path(folder).glob("sglang-*.dist-info/INSTALLER")):
            try:
                return file.read_text("utf-8").strip()
            except OSError:
                continue
    return ""


def look(environ: dict[str, str], prefix: str, path: list[str]) -> dict[str, Any]:
    """Say which index the environment uses.

    Args:
        environ: its variables.
        prefix: `sys.prefix` of its interpreter.
        path: its `sys.path`, where sglang's metadata says which tool installed it; that tool's settings count first.

    Returns:
        ``url``; ``source``, the variable or file that names it, empty for the default; ``no_index``: pip is told to
        use none; ``reach``: what pip needs to get there, by option.
    """
    pip, uv = _pip(environ, prefix), _uv(environ)
    named = [pip.get("index-url"), uv]
    if _installer(path) == "uv":
        named.reverse()
    url, source = next((one for one in named if one is not None), (PYPI, ""))
    return {
        "url": url,
        "source": source,
        "no_index": pip.get("no-index", ("", ""))[0].lower() in ("1", "true", "yes", "on"),
        "reach": {name: pip[name][0] for name in _REACH if name in pip},
    }


def without_credentials(url: str) -> str:
    """An address that may be shown, and may leave the machine."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


if __name__ == "__main__":
    _found = look(dict(os.environ), sys.prefix, sys.path)
    # Credentials stay on the node.
    print(MARK + json.dumps({"url": without_credentials(_found["url"]), "source": _found["source"]}))  # noqa: T201 - sent
