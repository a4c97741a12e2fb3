"""The word CORE becomes a core: read here, or mirrored from the node that holds it."""

from __future__ import annotations

import asyncio
import os
import stat as stat_module
import tempfile
from dataclasses import replace
from pathlib import Path, PurePosixPath

from flare.cores.orbit_limits import check_fits
from flare.cores.primary import Primary, load_primary, load_primary_isolated
from flare.cores.reference import CoreReference, LocalReference, NodeReference
from flare.cores.safetensors import PREFIX_LENGTH, header_length
from flare.errors import (
    CoreError,
    FlareError,
    IntegrityError,
    NotFoundError,
    TrustError,
    UnsupportedError,
    UsageError,
)
from flare.files import describe_os_error, scratch_folder
from flare.orbit.client import REQUEST_TIMEOUT, Client
from flare.orbit.orbit_records import NodeEntry
from flare.paths import safe_component
from flare.session import Session
from flare.values import dataclass
from flare.wire.messages import Get, Stat
from flare.wire.messages.files import MAX_GET

GET_TIMEOUT = 300.0  # seconds for 256 MiB over a slow management link


@dataclass(frozen=True, slots=True)
class Core:
    """A core whose index is verified, and where its bytes are.

    Attributes:
        reference: as the operator wrote it.
        primary: header and index; its `path` is the file here, or the name that messages use.
        source: the node that holds it; None when its files are on this host.
        path: the primary's absolute path, on that node or here.
    """

    reference: CoreReference
    primary: Primary
    source: NodeEntry | None
    path: str

    @property
    def default_name(self) -> str:
        """The group's name when nobody gives one."""
        return safe_component(self.reference.default_name)[:63]

    @property
    def export(self) -> str:
        """The export as 32 hex digits."""
        return self.primary.index.export.hex()

    @property
    def entry(self) -> str:
        """The complete core's directory name in a node's cache."""
        return f"{self.export}-{self.primary.size}"

    @property
    def primary_name(self) -> str:
        """The primary's file name."""
        return PurePosixPath(self.path).name

    @property
    def files(self) -> tuple[tuple[str, int], ...]:
        """Every stored file as (path relative to the primary's folder, size in bytes), the primary first."""
        companions = [
            (file.path, self.primary.stored_size(number))
            for number, file in enumerate(self.primary.index.files)
            if file.path
        ]
        return ((self.primary_name, self.primary.size), *companions)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(size for _, size in self.files)


async def resolve_core(client: Client, reference: CoreReference) -> Core:
    """Find, read and verify a core's index; whether its publisher is trusted is not said yet.

    Raises:
        UnsupportedError: a repository, which this version cannot acquire; or a core of too many files.
        UsageError: what looks like a repository is a file here.
        NotFoundError: no such file or node.
        CoreError, TrustError: it is no core, or its signature is missing or wrong.
        IntegrityError: its digest table is not the one that was signed.
        UnreachableError: the node that holds it does not answer.
    """
    if isinstance(reference, LocalReference | NodeReference):
        if isinstance(reference, LocalReference):
            core = resolve_local(reference)
        else:
            core = await resolve_on_node(client, reference)
        check_fits([name for name, _ in core.files])  # before anything is planned
        # A core of this host is read without a pause: a Ctrl-C that came meanwhile ends the command here, and
        # not behind the question that follows.
        await asyncio.sleep(0)
        return core
    if Path(str(reference)).exists():
        raise UsageError(f"{reference} is the name of a repository. For the file here write ./{reference}")
    raise UnsupportedError(
        f"{reference} is the name of a repository, and cores from repositories are not available in this "
        "version. Download the model, make a core of it with `flare ignition export`, and run that file."
    )


def resolve_local(reference: LocalReference) -> Core:
    """Read a core on this host, and check its digest table and that its companions are there."""
    path = Path(os.path.abspath(Path(reference.path).expanduser()))  # noqa: PTH100 - links stay as written
    primary = load_primary(path)
    core = Core(reference, primary, None, str(path))
    sizes = {}
    for name, _ in core.files[1:]:
        try:
            information = (path.parent / name).stat()
        except OSError:
            continue
        if stat_module.S_ISREG(information.st_mode):
            sizes[name] = information.st_size
    check_companions(core, sizes, "here")
    primary.digests()
    return core


async def resolve_on_node(client: Client, reference: NodeReference) -> Core:
    """Mirror the beginning of a core that a node holds and verify it like a file here."""
    node = client.controller.orbit.node(reference.node)
    async with client.session(node) as session:
        try:
            stat = await session.request(Stat(reference.path), timeout=REQUEST_TIMEOUT)
        except NotFoundError as problem:
            raise NotFoundError(
                f"Node {node.name} has no core at {reference.path}. {problem.message}"
            ) from None
        with scratch_folder(Path(tempfile.gettempdir()), "flare-mirror-") as folder:
            try:
                primary = await _mirror(session, reference.path, stat.size, folder)
            except (CoreError, TrustError, IntegrityError) as problem:
                # The mirror is gone when a person reads this.
                mirror = str(_mirror_path(folder, reference.path))
                raise type(problem)(problem.message.replace(mirror, str(reference))) from None
    core = Core(reference, primary, node, reference.path)
    check_companions(core, {item.name: item.size for item in stat.companions}, f"on node {node.name}")
    return core


async def _mirror(session: Session, path: str, size: int, folder: Path) -> Primary:
    """Copy header, index and digest table into a sparse file of the primary's length, and verify them."""
    mirror = _mirror_path(folder, path)
    what = str(mirror)
    prefix = await _get(session, path, 0, min(PREFIX_LENGTH, size))
    end = PREFIX_LENGTH + header_length(prefix, what)
    if end > size:
        raise CoreError(f"{what} is cut off: its header ends at byte {end} of {size}.")
    try:
        with mirror.open("wb") as file:
            file.write(prefix)
            file.write(await _get(session, path, PREFIX_LENGTH, end - PREFIX_LENGTH))
            file.truncate(size)
        # What a node sends is parsed in a child with bounded memory and time.
        primary = await load_primary_isolated(mirror)
        with mirror.open("r+b") as file:
            file.seek(primary.digests_offset)
            file.write(await _get(session, path, primary.digests_offset, primary.index.digests_length))
    except OSError as problem:
        raise describe_os_error(problem, "Cannot mirror the core's header") from None
    primary.digests()
    return replace(primary, path=Path(path))


def _mirror_path(folder: Path, path: str) -> Path:
    return folder / PurePosixPath(path).name


async def _get(session: Session, path: str, offset: int, length: int) -> bytes:
    parts = []
    while length:
        step = min(length, MAX_GET)
        reply = await session.request(Get(path, offset, step), timeout=REQUEST_TIMEOUT)
        if reply.length != step:
            raise CoreError(f"The core {path} is shorter than its node said: it changes while it is read.")
        parts.append(await session.receive_data(step, timeout=GET_TIMEOUT))
        offset += step
        length -= step
    return b"".join(parts)


def check_companions(core: Core, sizes: dict[str, int], where: str) -> None:
    """Refuse a core whose companions are missing or of another size.

    Args:
        sizes: what is there: path relative to the primary's folder -> size in bytes.
        where: for the message, such as "here" or "on node maxwell".

    Raises:
        CoreError: a file is missing, or has another size than the signed index says.
    """
    problem: FlareError | None = None
    for name, size in core.files[1:]:
        if name not in sizes:
            problem = CoreError(
                f"The core {core.path} needs the file {name} beside it, and no such file is {where}. "
                "Copy the whole folder."
            )
        elif sizes[name] != size:
            problem = CoreError(
                f"The file {name} of the core {core.path} has {sizes[name]} bytes {where}, but its signed "
                f"index says {size}. Copy or export it again."
            )
        if problem is not None:
            raise problem
