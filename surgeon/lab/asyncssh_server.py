"""An SSH server for machines without OpenSSH's sshd: runs commands and serves files as the user who started it.

Run as ``python -m surgeon.lab.asyncssh_server --port N --host-key F --authorized-keys F --pid-file F``.
It behaves as sshd does towards a client that asks for no terminal: a command goes to the user's shell, bytes pass
both ways, the exit status or signal comes back, and channels are independent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pwd
import signal
from pathlib import Path

import asyncssh

_CHUNK = 65536


def _shell() -> str:
    return pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"


async def _serve_process(process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Run one channel's command to its end, and answer when its output is through, as sshd does."""
    shell = _shell()
    arguments = () if process.command is None else ("-c", process.command)
    home = Path.home()
    child = await asyncio.create_subprocess_exec(
        shell,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=home if home.is_dir() else "/",
        start_new_session=True,
    )
    # For the type checker: the pipes were asked for.
    assert child.stdin and child.stdout and child.stderr  # noqa: S101, PT018 - as above
    feeding = asyncio.create_task(_feed(process.stdin, child.stdin))
    await asyncio.gather(_drain(child.stdout, process.stdout), _drain(child.stderr, process.stderr))
    status = await child.wait()
    feeding.cancel()
    if status < 0:
        process.exit_with_signal(signal.Signals(-status).name.removeprefix("SIG"))
    else:
        process.exit(status)


async def _feed(source: asyncssh.SSHReader[bytes], sink: asyncio.StreamWriter) -> None:
    """Pass the client's bytes on until it ends them, or the command stops reading."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, asyncssh.Error):
        while data := await source.read(_CHUNK):
            sink.write(data)
            await sink.drain()
    sink.close()


async def _drain(source: asyncio.StreamReader, sink: asyncssh.SSHWriter[bytes]) -> None:
    """Pass the command's bytes on; when the client is gone, keep the command from blocking on a full pipe."""
    client_gone = False
    while data := await source.read(_CHUNK):
        if client_gone:
            continue
        try:
            sink.write(data)
            await sink.drain()
        except (BrokenPipeError, ConnectionResetError, asyncssh.Error):
            client_gone = True


async def _serve(options: argparse.Namespace) -> None:
    server = await asyncssh.listen(
        "127.0.0.1",
        options.port,
        server_host_keys=[str(options.host_key)],
        authorized_client_keys=str(options.authorized_keys),
        process_factory=_serve_process,
        sftp_factory=True,
        encoding=None,
    )
    options.pid_file.write_text(f"{os.getpid()}\n", encoding="ascii")
    stopped = asyncio.Event()
    for how in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(how, stopped.set)
    await stopped.wait()
    server.close()
    options.pid_file.unlink(missing_ok=True)


def main() -> None:
    """Serve until a signal says otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host-key", type=Path, required=True)
    parser.add_argument("--authorized-keys", type=Path, required=True)
    parser.add_argument("--pid-file", type=Path, required=True)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
