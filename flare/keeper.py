"""The keeper: parent of one process tree that must not outlive who started it.

A rank starts an engine, an engine starts workers, and any of them may be killed, or put itself into a
session of its own. The keeper is a child subreaper, so every one of them that loses its parent comes back
to it, and "no child left" is the exact answer to "is everything gone?". It holds one end of a control
socket; when the other end closes, whoever started it is gone, and the whole tree is killed.

It is started as a plain script that imports next to nothing, so that it is there in a few milliseconds (a
launch starts five, most of them one after the other):

    python -I -S flare/keeper.py --control FD -- PROGRAM ARGUMENT...

| starter to keeper | means |
|---|---|
| `T` | SIGTERM to the kept process |
| `K` | SIGKILL to everything |
| end of stream | the starter is gone: SIGKILL to everything |

| keeper to starter | means |
|---|---|
| `started PID` | the kept process runs |
| `failed TEXT` | it could not be started |
| `exited STATUS` | it ended (a negative status is a signal's number) |
| `gone` | nothing of its tree is left; the keeper ends |
"""

from __future__ import annotations

# The module signal without its enums, which would take a third of this script's start.
import _signal as signal  # type: ignore[import-not-found]
import os
import select
import sys

PR_SET_PDEATHSIG = 1  # as in flare.system, which a script without site-packages cannot import
PR_SET_CHILD_SUBREAPER = 36
REAP_INTERVAL = 0.05  # seconds between two looks at a tree that is being killed
WAIT_INTERVAL = 1.0  # seconds; only a fallback, SIGCHLD wakes the loop through the wakeup descriptor

TERMINATE = b"T"
KILL = b"K"


def command(control: int, argv: list[str]) -> list[str]:
    """Return the command line that starts a keeper over `argv`.

    Args:
        control: the keeper's end of the control socket; pass it on with `pass_fds`.
        argv: the program, as an absolute path or a name on PATH, and its arguments.
    """
    return [sys.executable, "-I", "-S", os.path.realpath(__file__), "--control", str(control), "--", *argv]


def _prctl(option: int, value: int) -> None:
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _parents() -> dict[int, int]:
    """Return the parent of every process that can be seen."""
    parents = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - thousands of entries; names are all that is needed
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command, in parentheses, may hold anything; what follows the last one is ours.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended while we looked
        parents[int(name)] = int(fields[1])
    return parents


def descendants(root: int) -> list[int]:
    """Return the processes below `root`, nearest first."""
    children: dict[int, list[int]] = {}
    for process, parent in _parents().items():
        children.setdefault(parent, []).append(process)
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(0), [])
        found.extend(below)
        waiting.extend(below)
    return found


def _kill_tree() -> None:
    for process in descendants(os.getpid()):
        try:
            os.kill(process, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


class Keeper:
    """One kept process, its tree, and the socket to whoever started us.

    Args:
        control: the socket's descriptor.
        argv: the program to keep and its arguments.
    """

    def __init__(self, control: int, argv: list[str]) -> None:
        self._control: int | None = control
        self._argv = argv
        self._leader = 0
        self._leader_ended = False
        self._killing = False
        self._wakeup, self._wakeup_signal = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_signal, warn_on_full_buffer=False)

    def run(self) -> int:
        """Keep until nothing is left; return this process's exit status."""
        try:
            self._start()
        except OSError as problem:
            self._tell(f"failed {problem.strerror}")
            return 1
        self._tell(f"started {self._leader}")
        self._release_descriptors()
        while self._reap():
            if self._killing:
                _kill_tree()
            self._listen(REAP_INTERVAL if self._killing else WAIT_INTERVAL)
        self._tell("gone")
        return 0

    def _start(self) -> None:
        """Fork and execute; an execute that fails is heard through a close-on-exec pipe."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        keeper = os.getpid()
        self._leader = os.fork()
        if self._leader == 0:
            try:
                os.setsid()
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != keeper:  # it died before the line above took effect
                    os._exit(127)
                os.execvp(self._argv[0], self._argv)
            except OSError as problem:
                os.write(write_end, str(problem.errno or 0).encode())
            finally:
                os._exit(127)
        os.close(write_end)
        with open(read_end, "rb") as pipe:
            failure = pipe.read()
        if failure:
            os.waitpid(self._leader, 0)
            raise OSError(int(failure), os.strerror(int(failure)))

    def _release_descriptors(self) -> None:
        """Let go of what only the kept process needs, so that the ends of its pipes are seen."""
        quiet = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(quiet, standard)
        keep = {0, 1, 2, self._control, self._wakeup, self._wakeup_signal}
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            if int(name) not in keep:
                try:
                    os.close(int(name))
                except OSError:  # the one that listed them
                    continue

    def _reap(self) -> bool:
        """Collect every ended child; return whether one is left."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if process == 0:
                return True
            if process == self._leader:
                self._leader_ended = True
                # Nothing of a rank outlives the rank: what it left behind is killed, not waited for.
                self._killing = True
                self._tell(f"exited {os.waitstatus_to_exitcode(status)}")

    def _listen(self, seconds: float) -> None:
        """Wait for an order, an ended child, or the time."""
        poll = select.poll()  # not select(): the starter's descriptors may have any number
        poll.register(self._wakeup, select.POLLIN)
        if self._control is not None:
            poll.register(self._control, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        if self._wakeup in ready:
            os.read(self._wakeup, 4096)
        if self._control in ready:
            self._obey()

    def _obey(self) -> None:
        assert self._control is not None
        try:
            orders = os.read(self._control, 64)
        except ConnectionError:
            orders = b""
        if not orders:
            os.close(self._control)
            self._control = None
        if not orders or KILL in orders:
            self._killing = True
        elif TERMINATE in orders and not self._leader_ended:
            # The leader is our child and not reaped yet: its number cannot mean another process.
            os.kill(self._leader, signal.SIGTERM)

    def _tell(self, line: str) -> None:
        if self._control is None:
            return
        try:
            os.write(self._control, line.encode() + b"\n")  # short, and nobody lets this socket fill
        except OSError:
            return  # whoever started us is gone, which the next look at the socket says too


def main() -> int:
    """Run as a script; see the module's text."""
    if len(sys.argv) < 5 or sys.argv[1] != "--control" or sys.argv[3] != "--":
        sys.stderr.write("usage: keeper.py --control FD -- PROGRAM ARGUMENT...\n")
        return 2
    # Signals meant for the group (a terminal's, or systemd's for the whole unit) must not end the one
    # process that sees to it that nobody is left behind.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    if os.getpgid(0) != os.getpid():  # else it leads a session already
        os.setsid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    control = int(sys.argv[2])
    os.set_inheritable(control, False)
    return Keeper(control, sys.argv[4:]).run()


if __name__ == "__main__":
    sys.exit(main())
