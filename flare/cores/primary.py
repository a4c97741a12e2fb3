"""The primary of a core: header, signed index, digest table.

Nothing here reads model data. A controller's sparse mirror, which holds only the first
`metadata_length` bytes of the file, is as good as the file itself.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

from flare.cores.index import MAX_INDEX, CoreIndex, fold
from flare.cores.safetensors import (
    HOW_TO_MAKE_A_CORE,
    PREFIX_LENGTH,
    Header,
    Tensor,
    header_length,
    parse_header,
    read_header,
)
from flare.errors import CoreError, FlareError, IdentityError, IntegrityError, NotFoundError, TrustError
from flare.identity import SIGNATURE_LENGTH, fingerprint, public_key_from_hex, verify
from flare.values import dataclass
from flare_workers.blocks import DIGEST_SIZE

INDEX_KEY = "flare.index"
PUBLISHER_KEY = "flare.publisher"
SIGNATURE_KEY = "flare.signature"
DIGESTS_TENSOR = "flare.block_digests"
SIGNED_PREFIX = b"flare core index\x00"  # keeps a signature over an index from being one over anything else
ISOLATED_SECONDS = 60.0  # a header of 48 MiB parses in about 10 s; a slow disk may take as long again
# A header of this size takes 25 ms and 4 MiB at worst, a child process 80 ms and 10 MiB before it begins.
SMALL_HEADER = 128 * 1024


class AcceptedPublishers(Protocol):
    """What `check_trust` needs of a trust store."""

    def accepts(self, fingerprint: str) -> bool:
        """Tell whether the publisher with this fingerprint was accepted."""
        ...


@dataclass(frozen=True, slots=True)
class Primary:
    """A primary whose index is checked and signed by `publisher`; whether that one is trusted is not said.

    Args:
        path: where it lies; None when it was given as bytes. Companions are relative to its folder.
        size: of the whole file in bytes, packed data included.
        index_text: the exact text that was signed.
        publisher: the Ed25519 public key, 32 bytes.
        digests_offset: where the digest table begins in the file, which is also where the data section does.
    """

    path: Path | None
    size: int
    index: CoreIndex
    index_text: str
    publisher: bytes
    signature: bytes
    digests_offset: int

    @property
    def index_sha256(self) -> bytes:
        """The SHA-256 of the index's exact text."""
        return self.index.index_sha256

    @property
    def fingerprint(self) -> str:
        """The publisher's fingerprint."""
        return fingerprint(self.publisher)

    @property
    def metadata_length(self) -> int:
        """Bytes from the file's start to the end of the digest table: what a receiver needs first."""
        return self.digests_offset + self.index.digests_length

    @property
    def root(self) -> Path:
        """The folder that companions' paths are relative to."""
        assert self.path is not None, "a primary that was given as bytes has no companions on disk"
        return self.path.parent

    def file_path(self, number: int) -> Path:
        """Return where file `number` lies: the primary itself for the data of a packed core."""
        path = self.index.files[number].path
        if not path:
            assert self.path is not None, "a primary that was given as bytes lies nowhere"
            return self.path
        return self.root / path

    def data_start(self, number: int) -> int:
        """Return where the covered bytes of file `number` begin in the file on disk, in bytes."""
        file = self.index.files[number]
        return file.offset if file.path else self.digests_offset + file.offset

    def stored_size(self, number: int) -> int:
        """Return how large file `number` is on disk, in bytes."""
        file = self.index.files[number]
        return file.offset + file.size if file.path else self.size

    def digests(self, read: Callable[[int, int], bytes] | None = None) -> bytes:
        """Return the digest table, checked against the index: 32 bytes a block, files in index order.

        Args:
            read: (offset, length) -> bytes of the primary; without it the file at `path` is read.

        Raises:
            IntegrityError: it is cut off or not the one that was signed.
        """
        table = (read or self._read)(self.digests_offset, self.index.digests_length)
        if hashlib.sha256(table).digest() != self.index.block_digests_sha256:
            raise IntegrityError(
                f"The digest table of {self.path or self.index.model} is not the one that was signed: "
                "the file is damaged. Fetch the core again."
            )
        return table

    def file_digests(self, table: bytes, number: int) -> bytes:
        """Return the part of the digest table that belongs to file `number`."""
        begin = self.index.first_block(number) * DIGEST_SIZE
        return table[begin : begin + self.index.files[number].blocks * DIGEST_SIZE]

    def _read(self, offset: int, length: int) -> bytes:
        assert self.path is not None, "a primary that was given as bytes needs a reader"
        with _open(self.path) as file:
            file.seek(offset)
            return file.read(length)


def load_primary(source: Path | bytes) -> Primary:
    """Read a primary and verify its signature; the digest table and other data stay unread.

    Args:
        source: its path (a link to a regular file is fine), or the whole file's bytes.

    Raises:
        NotFoundError: there is no such file.
        CoreError: it is no core, or a damaged one.
        TrustError: the signature is missing or wrong.
    """
    if isinstance(source, bytes):
        return primary_from_parts(source, size=len(source))
    with _open(source) as file:
        header = read_header(file, str(source))
    return _primary(header, source, str(source))


def primary_from_parts(prefix: bytes, *, size: int, path: Path | None = None) -> Primary:
    """Return the primary of a file of which only the beginning is at hand.

    Args:
        prefix: at least the first 8 bytes and the header.
        size: of the whole file in bytes.
        path: what the primary will report as its own.

    Raises:
        CoreError, TrustError: as load_primary.
    """
    what = str(path) if path else "The primary"
    end = PREFIX_LENGTH + header_length(prefix, what)
    if len(prefix) < end or size < end:
        raise CoreError(f"{what} is cut off: its header ends at byte {end} of {min(len(prefix), size)}.")
    return _primary(parse_header(prefix[PREFIX_LENGTH:end], size - end, what), path, what)


def check_trust(primary: Primary, trust_store: AcceptedPublishers) -> None:
    """Refuse a core whose publisher nobody here has accepted.

    Raises:
        TrustError: with the fingerprint and what to do about it.
    """
    if not trust_store.accepts(primary.fingerprint):
        raise TrustError(
            f"The core {primary.path or primary.index.model} is signed by a publisher that is not accepted "
            f"here. Its fingerprint is {primary.fingerprint}. Compare it with what `flare publisher show` "
            "prints where the core was made; if it is the same, run `flare publisher accept PROFILE_FILE`, "
            f"or give --accept-publisher {primary.fingerprint}."
        )


async def load_primary_isolated(path: Path) -> Primary:
    """Like load_primary, with bounded memory and time: for files that strangers send.

    A large header is parsed in a child process, which protects the caller's memory and event loop; it is our
    own code under our own account.

    Raises:
        NotFoundError, CoreError, TrustError: as load_primary.
    """
    import asyncio  # not above: the child needs this module, and starts in half the time without asyncio

    return await asyncio.to_thread(_load_bounded, path)


def _load_bounded(path: Path) -> Primary:
    with _open(path) as file:
        prefix = file.read(PREFIX_LENGTH)
        length = header_length(prefix, str(path))
        if length <= SMALL_HEADER:
            # Of what was read, and of nothing that takes its place meanwhile.
            return primary_from_parts(
                prefix + file.read(length), size=os.fstat(file.fileno()).st_size, path=path
            )
    return _load_in_child(path)


def _load_in_child(path: Path) -> Primary:
    # -P keeps a module in the current folder from taking the place of ours.
    command = [sys.executable, "-P", "-m", "flare.cores.isolated", os.fspath(path), str(os.getpid())]
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ISOLATED_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise CoreError(f"{path} took more than {ISOLATED_SECONDS:g} s to parse: refused.") from None
    try:
        result = pickle.loads(child.stdout)  # noqa: S301 -- written by our own child, not by the file
    except (EOFError, pickle.UnpicklingError):
        result = None
    if isinstance(result, Primary):
        return result
    if isinstance(result, tuple):
        raise FlareError.from_wire(*result)
    raise CoreError(f"{path} needs more memory to parse than a core's header may, so it was refused.")


def _open(path: Path) -> BinaryIO:
    """Open a regular file; a pipe of that name must not make us wait."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFoundError(f"There is no core at {path}.") from None
    except OSError as problem:
        raise CoreError(f"The core {path} cannot be read: {problem.strerror}.") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        hint = " Name the primary .safetensors file in it." if stat.S_ISDIR(mode) else ""
        raise CoreError(f"{path} is not a regular file, so it is no core.{hint}")
    return open(descriptor, "rb")


def _primary(header: Header, path: Path | None, what: str) -> Primary:
    text, publisher, signature = _signed_index(header.metadata, what)
    index = CoreIndex.from_text(text)
    _check_table(header, index, what)
    if path is not None and any(fold(file.path.split("/")[0]) == fold(path.name) for file in index.files):
        raise CoreError(f'{what}: a companion has the primary\'s own name, "{path.name}".')
    return Primary(path, header.size, index, text, publisher, signature, header.data_offset)


def _signed_index(metadata: Mapping[str, str], what: str) -> tuple[str, bytes, bytes]:
    """Take index, publisher and signature out of the metadata; verified, but not yet parsed."""
    if INDEX_KEY not in metadata:
        raise CoreError(f'{what} is a model, not a core (it has no "{INDEX_KEY}"); {HOW_TO_MAKE_A_CORE}')
    unknown = sorted(set(metadata) - {INDEX_KEY, PUBLISHER_KEY, SIGNATURE_KEY})
    if unknown:
        raise CoreError(f'{what}: "__metadata__" has the unknown key "{unknown[0][:80]}".')
    text = metadata[INDEX_KEY]
    data = text.encode("utf-8")
    if len(data) > MAX_INDEX:
        raise CoreError(f'{what}: "{INDEX_KEY}" has {len(data)} bytes; at most {MAX_INDEX} are allowed.')
    if PUBLISHER_KEY not in metadata:
        raise TrustError(f'{what} is not signed: it has no "{PUBLISHER_KEY}". Export the core again.')
    try:
        publisher = public_key_from_hex(metadata[PUBLISHER_KEY])
    except IdentityError as problem:
        raise TrustError(f'{what}: "{PUBLISHER_KEY}" is no public key: {problem.message}') from None
    by = f"the publisher with fingerprint {fingerprint(publisher)}"
    if SIGNATURE_KEY not in metadata:
        raise TrustError(f'{what} names {by}, but is not signed: it has no "{SIGNATURE_KEY}".')
    try:
        signature = bytes.fromhex(metadata[SIGNATURE_KEY])
    except ValueError:
        signature = b""
    if len(signature) != SIGNATURE_LENGTH or not verify(publisher, signature, SIGNED_PREFIX + data):
        raise TrustError(f"{what} is not signed by {by}, which it names: the signature does not match.")
    return text, publisher, signature


def _check_table(header: Header, index: CoreIndex, what: str) -> None:
    """Hold the header's tensors against the signed index."""
    if header.table_sha256() != index.tensor_table_sha256:
        raise CoreError(f"{what}: its tensor table is not the one that was signed.")
    table = next((tensor for tensor in header.tensors if tensor.name == DIGESTS_TENSOR), None)
    wanted = Tensor(DIGESTS_TENSOR, "U8", (index.block_count, DIGEST_SIZE), 0, index.digests_length)
    if table != wanted:
        raise CoreError(
            f'{what}: its first tensor is not "{DIGESTS_TENSOR}" '
            f"with shape [{index.block_count}, {DIGEST_SIZE}]."
        )
    if (len(header.tensors) > 1) != index.packed:
        raise CoreError(
            f"{what}: a packed core holds its model's tensors behind the digest table, "
            "and no other core does."
        )
    covered = index.files[0].size if index.packed else 0
    if header.data_length != index.digests_length + covered:
        raise CoreError(
            f"{what} has {header.data_length - index.digests_length} bytes of packed data, "
            f"but its index covers {covered}."
        )
