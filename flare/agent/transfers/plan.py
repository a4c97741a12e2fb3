"""What a TRANSFER asks for, held against the signed index. Pure.

A request counts ranges from the start of each file on disk. From here on they count *covered* bytes, from
where block 0 of the file's digests begins: for the data of a packed primary that is behind its digest table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field

from flare.cores.index import CoreIndex
from flare.cores.primary import Primary
from flare.errors import ConflictError, FlareError, ForbiddenError, RemoteProtocolError, TrustError
from flare.trust.grants import Package, check_ranges
from flare.values import dataclass
from flare.wire.messages import FileRanges
from flare_workers.ranges import Ranges, Run

_DIGEST_NAMED = re.compile(r"[0-9a-f]{64}\.safetensors\Z")


@dataclass(frozen=True, slots=True)
class WantedFile:
    """One file of a core, and which of its bytes this node is to hold.

    Args:
        number: in the index; None for the primary of a core that is not packed.
        path: in the grant's package and in the core directory.
        size: of the whole file on disk, in bytes.
        start: where the covered bytes begin in it.
        covered: how many bytes the digests cover.
        wanted: of the covered bytes, in whole blocks.
        digests: 32 bytes a covered block.
    """

    number: int | None
    path: str
    size: int
    start: int
    covered: int
    wanted: Ranges
    digests: bytes = field(repr=False)

    @property
    def whole(self) -> bool:
        """Whether every covered byte is wanted."""
        return self.wanted == Ranges.whole(self.covered)

    @property
    def marked_ranges(self) -> tuple[Run, ...] | None:
        """What a marker says of the file once all of `wanted` is verified."""
        return None if self.whole else self.wanted.runs

    def on_disk(self, ranges: Ranges) -> tuple[Run, ...]:
        """Return covered ranges as they are counted in the file and on the wire."""
        return tuple((self.start + offset, length) for offset, length in ranges)


@dataclass(frozen=True, slots=True)
class Plan:
    """What this node will hold.

    Args:
        primary: the primary.
        companions: in index order.
        complete: whether that is all that the index gives, so that the directory counts as verified then.
    """

    primary: WantedFile
    companions: tuple[WantedFile, ...]
    complete: bool

    @property
    def files(self) -> tuple[WantedFile, ...]:
        """Every file; the primary last, so that a directory that has one has the others too."""
        return (*self.companions, self.primary)


def check_primary(primary: Primary, package: Package, where: str) -> None:
    """Hold a primary against the grant that names its core.

    Args:
        where: begins the sentence, such as "The core on hertz".

    Raises:
        ConflictError: it is another core.
        TrustError: another publisher signed it.
    """
    if primary.fingerprint != package.publisher:
        raise TrustError(
            f"{where} is signed by the publisher {primary.fingerprint}, not by {package.publisher} as the "
            "grant says. Resolve the core again."
        )
    index = primary.index
    names = [file.path for file in index.files if file.path]
    if (
        primary.index_sha256.hex() != package.index_sha256
        or index.export.hex() != package.export
        or primary.size != package.length
        or set(package.files[1:]) != set(names)
    ):
        raise ConflictError(
            f"{where} is not the core that the grant names: its index differs. It was changed since the "
            "command read it; run the command again."
        )


def make_plan(
    primary: Primary, table: bytes, package: Package, rank: int | None, asked: Sequence[FileRanges]
) -> Plan:
    """Return what a request asks for.

    Args:
        primary: checked by `check_primary`.
        table: its digest table, checked.
        rank: whose part; None for the complete core.
        asked: the request's files.

    Raises:
        ForbiddenError: more than the index gives this rank.
        RemoteProtocolError: a file twice, of another size, or ranges that are none.
        CoreError: the core has no such rank.
    """
    index = primary.index
    allowed = index.complete() if rank is None else index.wanted(rank)
    numbers = {file.path: number for number, file in enumerate(index.files) if file.path}
    if index.packed:
        numbers[package.files[0]] = 0
    wanted: dict[int, Ranges] = {}
    seen: set[str] = set()
    for file in asked:
        if file.path in seen:
            raise RemoteProtocolError(f'TRANSFER names the file "{file.path}" twice.')
        seen.add(file.path)
        ranges = _checked(primary, package, numbers, file)
        number = numbers.get(file.path)
        if number is None:
            continue  # a primary without data: its header and table come anyway
        size = index.files[number].size
        rounded = ranges.rounded_out(size)
        if rounded.runs and _named_by_digest(file.path):
            rounded = Ranges.whole(size)  # its name can only be checked against all of it
        elif not allowed.get(number, Ranges()).covers(rounded):
            raise ForbiddenError(f"The request asks for bytes of {file.path} that rank {rank} does not read.")
        if rank is None and rounded != Ranges.whole(size):
            raise _only_whole(file.path)
        if rounded.runs or size == 0:
            wanted[number] = rounded
    if rank is None and index.packed and 0 not in wanted:
        raise _only_whole(package.files[0])
    files = {number: _file(primary, table, package, number, ranges) for number, ranges in wanted.items()}
    if not index.packed:
        head = WantedFile(
            None, package.files[0], primary.size, primary.metadata_length, 0, Ranges(), digests=b""
        )
    else:
        head = files.pop(0) if 0 in files else _file(primary, table, package, 0, Ranges())
    companions = tuple(files[number] for number in sorted(files))
    return Plan(head, companions, _is_complete(index, allowed, wanted))


def _only_whole(path: str) -> RemoteProtocolError:
    """Whoever reads a complete core's directory takes each file for whole, and holes for zeros."""
    return RemoteProtocolError(
        f"TRANSFER asks for a part of {path}, but a complete core's directory takes whole files alone."
    )


def _checked(primary: Primary, package: Package, numbers: Mapping[str, int], file: FileRanges) -> Ranges:
    """Return the covered bytes that a request asks of one file."""
    is_primary = file.path == package.files[0]
    if not is_primary and file.path not in numbers:
        raise ForbiddenError(f"The core has no file {file.path}.")
    size = primary.size if is_primary else primary.stored_size(numbers[file.path])
    if file.size != size:
        raise RemoteProtocolError(f'TRANSFER says that "{file.path}" has {file.size} bytes; it has {size}.')
    try:
        check_ranges(file.ranges, size)
    except FlareError as problem:
        raise RemoteProtocolError(f'TRANSFER, "{file.path}": {problem.message}') from None
    ranges = Ranges.of(file.ranges)
    if not is_primary:
        return ranges
    start = primary.metadata_length  # a packed core's data follows its digest table
    data = ranges.intersection(Ranges.of(((start, size - start),)))
    return Ranges.of((offset - start, length) for offset, length in data)


def _file(primary: Primary, table: bytes, package: Package, number: int, wanted: Ranges) -> WantedFile:
    file = primary.index.files[number]
    return WantedFile(
        number=number,
        path=file.path or package.files[0],
        size=primary.stored_size(number),
        start=primary.data_start(number),
        covered=file.size,
        wanted=wanted,
        digests=primary.file_digests(table, number),
    )


def _named_by_digest(path: str) -> bool:
    return _DIGEST_NAMED.match(path) is not None


def _is_complete(index: CoreIndex, allowed: Mapping[int, Ranges], wanted: Mapping[int, Ranges]) -> bool:
    return all(number in wanted and wanted[number].covers(ranges) for number, ranges in allowed.items())
