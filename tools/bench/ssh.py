"""An sshd of the benchmark's own, and what copying through it takes: scp, and rsync with sha256sum."""

from __future__ import annotations

import getpass
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from floors import cpu
from processes import tree, tree_seconds

CIPHER = "chacha20-poly1305@openssh.com"
PACKAGES = {"sshd": "openssh-server", "ssh": "openssh-client", "scp": "openssh-client", "rsync": "rsync"}
HOST = "bench"
_SETTLED_WITHIN = 5.0  # seconds until sshd has reaped a connection's processes
_PRIVILEGE_FOLDER = Path("/run/sshd")  # sshd wants it when root starts it; else systemd makes it


def find(program: str) -> str | None:
    """Where a program is; sshd lies outside a user's PATH."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def missing_packages() -> list[str]:
    """The Debian packages whose programs are missing."""
    return sorted({package for program, package in PACKAGES.items() if find(program) is None})


def version() -> str:
    """ssh's version, with its OpenSSL."""
    return subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True).stderr.strip()


class Server:
    """sshd on a free loopback port, with keys and configuration in one folder; ends with the `with` block.

    Args:
        folder: For the keys and configuration; owner-only.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = folder / "ssh_config"
        self._made_privilege_folder = False

    def __enter__(self) -> Server:
        folder = self._folder
        for name in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
            )
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        (folder / "authorized_keys").write_bytes((folder / "user_key.pub").read_bytes())
        host_key = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}")
        (folder / "sshd_config").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nPidFile none\nStrictModes no\nUsePAM no\n"
            f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
            f"Ciphers {CIPHER}\nCompression no\nSubsystem sftp internal-sftp\nLogLevel ERROR\n"
        )
        self._config.write_text(
            f"Host {HOST}\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
            f"  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {folder}/known_hosts\n  GlobalKnownHostsFile none\n"
            f"  StrictHostKeyChecking yes\n  BatchMode yes\n  Ciphers {CIPHER}\n  Compression no\n"
        )
        if os.geteuid() == 0 and not _PRIVILEGE_FOLDER.exists():
            _PRIVILEGE_FOLDER.mkdir(mode=0o755)
            self._made_privilege_folder = True
        sshd = find("sshd")
        assert sshd is not None
        with (folder / "sshd.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sshd, "-D", "-e", "-f", str(folder / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._wait_until_it_listens(port)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        if self._made_privilege_folder:
            _PRIVILEGE_FOLDER.rmdir()

    def _wait_until_it_listens(self, port: int) -> None:
        while self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise SystemExit(f"transfer.py: sshd did not start: {(self._folder / 'sshd.log').read_text()}")

    def connect(self) -> tuple[float, float]:
        """CPU-seconds and seconds of a connection that carries nothing."""
        return self._run(["ssh", "-F", str(self._config), HOST, "true"])

    def scp(self, source: Path, target: Path) -> tuple[float, float]:
        """CPU-seconds of both ends and seconds of copying a folder."""
        return self._run(["scp", "-q", "-r", "-F", str(self._config), str(source), f"{HOST}:{target}"])

    def rsync(self, source: Path, target: Path) -> tuple[float, float]:
        """As `scp`, with `rsync -W`: nothing is compared with what may be there."""
        remote = f"ssh -F {self._config}"
        return self._run(["rsync", "-r", "-W", "-e", remote, f"{source}/", f"{HOST}:{target}/"])

    def _run(self, words: list[str]) -> tuple[float, float]:
        roots = (self._process.pid,)
        before = cpu(resource.RUSAGE_CHILDREN) + tree_seconds(roots)
        started = time.monotonic()
        result = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - started
        if result.returncode != 0:
            log = (self._folder / "sshd.log").read_text()
            raise SystemExit(f"transfer.py: `{' '.join(words)}` failed: {result.stderr}{log}")
        deadline = time.monotonic() + _SETTLED_WITHIN
        while len(tree(roots)) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        return cpu(resource.RUSAGE_CHILDREN) + tree_seconds(roots) - before, seconds


def sha256sum(target: Path, digests: dict[str, str]) -> tuple[float, float]:
    """CPU-seconds and seconds of checking a folder's files against their SHA-256 by name."""
    sums = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    before, started = cpu(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(["sha256sum", "--check", "--quiet"], input=sums, text=True, cwd=target, check=True)
    return cpu(resource.RUSAGE_CHILDREN) - before, time.monotonic() - started
