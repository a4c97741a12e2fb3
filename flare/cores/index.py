"""The signed index: what a core is, which bytes belong to it, and which of them each rank reads."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import accumulate
from typing import Any, Literal, cast

from flare.errors import CoreError
from flare.limits import MAX_FILES, MAX_RANKS, MAX_RUNS
from flare.paths import check_relative_path
from flare.printable import printable
from flare.strict_json import MAX_COUNT, Reader, canonical, loads
from flare.values import dataclass
from flare_workers.blocks import BLOCK_SIZE, DIGEST_SIZE, block_count
from flare_workers.ranges import Ranges

Layout = Literal["multi_host", "single_host"]

FORMAT = 1
EXPORT_LENGTH = 16  # bytes: the first 32 hex digits of the SHA-256
MAX_INDEX = 32 << 20  # bytes of JSON text; 65,536 files with long paths fit
MAX_MODEL_NAME = 200  # characters, so that a line of a table still holds it
REVISIONS = ("gb10", "gb202", "gb300", "cpu")
ENGINES = ("llama.cpp", "vllm", "sglang")
# A legacy companion, which caches keep under that name for every core that has it.
_DIGEST_NAMED = re.compile(r"[0-9a-f]{64}\.safetensors\Z")
LAYOUTS = ("multi_host", "single_host")
MODEL_FOLDER = "model"  # what an engine is given, never the core's root
CACHED_PRIMARY = "model.safetensors"  # the primary's name in the ranks' model cache
# Files that run code when an engine loads them, or that can: pickles execute what they hold.
CODE_SUFFIXES = (".py", ".pyc", ".so", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True, slots=True)
class CoreFile:
    """One file of a core.

    Args:
        path: relative to the primary's folder; empty for the data of a packed primary.
        offset: where the covered bytes begin: in the file, or for path "" in the data section.
        size: covered bytes.
        sha256: of the covered bytes.
    """

    path: str
    offset: int
    size: int
    sha256: bytes

    @property
    def blocks(self) -> int:
        """How many 1 MiB blocks the covered bytes have; the last one may be shorter."""
        return block_count(self.size)


@dataclass(frozen=True, slots=True)
class CoreIndex:
    """Every member of the index, checked; sizes in bytes. Make one with `from_text` or `create`.

    Args:
        export: 16 bytes that follow from all other members.
        device_bytes: what each rank's device must hold, beside `serving_reserve`.
        decode_weight_bytes: weights read for one decoded token; None where nobody knows.
        index_sha256: of the index's exact text.
    """

    export: bytes
    model: str
    engine: str
    revision: str
    layout: Layout
    ranks: int
    tensor_parallel: int
    pipeline_parallel: int
    device_bytes: tuple[int, ...]
    serving_reserve: int
    decode_weight_bytes: int | None
    block_digests_sha256: bytes
    tensor_table_sha256: bytes
    files: tuple[CoreFile, ...]
    index_sha256: bytes = b""
    # A million tuples of Python integers would take 150 MB and seconds to hand from one process
    # to another; None stands for the complete core, an array for (file, offset, length) triples.
    _runs: tuple[array[int] | None, ...] = field(default=(), repr=False)
    _first_blocks: array[int] = field(default_factory=lambda: array("Q"), repr=False, compare=False)

    @classmethod
    def from_text(cls, text: str) -> CoreIndex:
        """Parse and check an index.

        Raises:
            CoreError: it breaks a rule; the message names the member.
        """
        what = "The core index"
        data = text.encode("utf-8", "surrogatepass")
        body = loads(data, limit=MAX_INDEX, what=what, error=CoreError)
        index = _parse(Reader(body, what, CoreError))
        claimed = body.pop("export")
        if export_of(body) != claimed:
            raise CoreError(f"{what}: its export {claimed} does not follow from its content.")
        return replace(index, index_sha256=hashlib.sha256(data).digest())

    @classmethod
    def create(cls, members: Mapping[str, Any]) -> tuple[CoreIndex, str]:
        """Return the index of `members` (all but "format" and "export", as in JSON) and its text."""
        body = {"format": FORMAT, **members}
        text = canonical({**body, "export": export_of(body)})
        return cls.from_text(text), text

    @property
    def packed(self) -> bool:
        """Whether the primary itself holds model data."""
        return self.files[0].path == ""

    @property
    def block_count(self) -> int:
        """Blocks of all files together."""
        return self._first_blocks[-1]

    @property
    def digests_length(self) -> int:
        """Bytes of the digest table."""
        return self.block_count * DIGEST_SIZE

    @property
    def total_bytes(self) -> int:
        """Covered bytes of all files together."""
        return sum(file.size for file in self.files)

    def first_block(self, number: int) -> int:
        """Return where the digests of file `number` begin in the digest table, in blocks."""
        return self._first_blocks[number]

    def rank_ranges(self, rank: int) -> dict[int, Ranges] | None:
        """Return what `rank` reads: ranges of covered bytes by file number; None is the complete core.

        Raises:
            CoreError: the core has no such rank.
        """
        runs = self._rank_runs(rank)
        if runs is None:
            return None
        pairs: dict[int, list[tuple[int, int]]] = {}
        for position in range(0, len(runs), 3):
            number, offset, length = runs[position : position + 3]
            pairs.setdefault(number, []).append((offset, length))
        return {number: Ranges.of(of_file) for number, of_file in pairs.items()}

    def wanted(self, rank: int) -> dict[int, Ranges]:
        """Return what `rank` reads, spelled out: every file whole where that is the complete core."""
        ranges = self.rank_ranges(rank)
        return self.complete() if ranges is None else ranges

    def complete(self) -> dict[int, Ranges]:
        """Return every byte of every file; files without bytes are there with no ranges."""
        return {number: Ranges.whole(file.size) for number, file in enumerate(self.files)}

    def rank_bytes(self, rank: int) -> int:
        """Return how many stored bytes `rank` reads."""
        runs = self._rank_runs(rank)
        return self.total_bytes if runs is None else sum(runs[2::3])

    def _rank_runs(self, rank: int) -> array[int] | None:
        if not 0 <= rank < self.ranks:
            raise CoreError(f"The core {self.model} has {self.ranks} ranks, so there is no rank {rank}.")
        return self._runs[rank]

    def code_files(self) -> list[str]:
        """Return the paths of companions that are code or pickles."""
        return [file.path for file in self.files if is_code(file.path)]

    def refuse_code(self, allow_code: bool) -> None:
        """Refuse to load a core that brings code along.

        Raises:
            CoreError: it does, and `allow_code` is false.
        """
        found = self.code_files()
        if found and not allow_code:
            raise CoreError(
                f"The core {self.model} holds {len(found)} file(s) that can run code when they are loaded, "
                f'first "{found[0]}". Give --allow-code only if you trust its publisher with this account.'
            )


def is_code(path: str) -> bool:
    """Tell whether loading the file at `path` can run code that is in it."""
    return path.lower().endswith(CODE_SUFFIXES)


def export_of(body: Mapping[str, Any]) -> str:
    """Return the export of an index that is given without it, as 32 hex digits."""
    return hashlib.sha256(canonical(body).encode("ascii")).hexdigest()[: 2 * EXPORT_LENGTH]


def model_file(index: CoreIndex) -> str:
    """Return what the engine opens, relative to the core's root: a GGUF file, or the model's folder.

    Raises:
        CoreError: a llama.cpp core that is packed, or without a GGUF file.
    """
    if index.engine != "llama.cpp":
        return MODEL_FOLDER
    if index.packed:
        raise CoreError(
            f"The core {index.model} is packed, and llama.cpp reads only GGUF files. Export the model again "
            "from its GGUF file."
        )
    for file in index.files:
        if file.path.lower().endswith(".gguf"):
            return file.path
    raise CoreError(
        f"The core {index.model} is for llama.cpp, but none of its files is a GGUF file. Export it again."
    )


def _parse(reader: Reader) -> CoreIndex:
    if reader.count("format") != FORMAT:
        reader.fail("format", f"is not {FORMAT}: this flare is too old for it, or the file is damaged")
    export = reader.hex("export", EXPORT_LENGTH)
    model = reader.text("model", limit=MAX_MODEL_NAME)
    if not model:
        reader.fail("model", "is empty")
    if printable(model) != model:
        # The name stands in questions and tables of our own: a line break in it could forge a line there.
        reader.fail("model", "has a control character")
    engine = _one_of(reader, "engine", ENGINES)
    revision = _one_of(reader, "revision", REVISIONS)
    layout = cast("Layout", _one_of(reader, "layout", LAYOUTS))
    ranks = reader.count("ranks", limit=MAX_RANKS)
    if ranks == 0:
        reader.fail("ranks", "is 0")
    parallel = reader.nested("parallel")
    tensor, pipeline = parallel.count("tensor", limit=MAX_RANKS), parallel.count("pipeline", limit=MAX_RANKS)
    parallel.finish()
    if tensor * pipeline != ranks:
        reader.fail("parallel", f"gives {tensor} x {pipeline} ranks, not {ranks}")
    device_bytes = reader.counts("device_bytes", limit=MAX_RANKS)
    if len(device_bytes) != ranks:
        reader.fail("device_bytes", f"has {len(device_bytes)} entries for {ranks} ranks")
    files = _files(reader)
    first_blocks = array("Q", accumulate((file.blocks for file in files), initial=0))
    index = CoreIndex(
        export=export,
        model=model,
        engine=engine,
        revision=revision,
        layout=layout,
        ranks=ranks,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        device_bytes=device_bytes,
        serving_reserve=reader.count("serving_reserve"),
        decode_weight_bytes=reader.count("decode_weight_bytes", default=None),
        block_digests_sha256=reader.hex("block_digests_sha256", DIGEST_SIZE),
        tensor_table_sha256=reader.hex("tensor_table_sha256", DIGEST_SIZE),
        files=files,
        _runs=_rank_runs(reader, ranks, layout, files),
        _first_blocks=first_blocks,
    )
    reader.finish()
    if index.block_count == 0:
        reader.fail("files", "hold no bytes at all")
    if index.packed and files[0].offset != index.digests_length:
        reader.fail("files", f"begin at offset {files[0].offset}, not behind the digest table")
    return index


def _one_of(reader: Reader, name: str, known: Sequence[str]) -> str:
    value: str = reader.text(name, limit=64)
    if value not in known:
        reader.fail(name, f"is {value!r}; known are {', '.join(known)}")
    return value


def _files(reader: Reader) -> tuple[CoreFile, ...]:
    files: tuple[CoreFile, ...] = reader.list_of("files", _file, limit=MAX_FILES)
    if not files:
        reader.fail("files", "is empty")
    if sum(file.size for file in files) > MAX_COUNT:
        reader.fail("files", "are larger together than any disk")
    names: dict[str, str] = {}
    folders: set[str] = set()
    for number, file in enumerate(files):
        if file.path == "":
            if number:
                reader.fail("files", f"[{number}] has an empty path, which only the first may have")
            continue
        if file.offset:
            reader.fail("files", f'has "{file.path}" with offset {file.offset}; a companion begins at 0')
        folded = fold(file.path)
        if folded in names:
            other = names[folded]
            same = "twice" if other == file.path else f'and "{other}", which differ by case alone'
            reader.fail("files", f'has "{file.path}" {same}')
        names[folded] = file.path
        parts = folded.split("/")
        folders.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    for folded in names.keys() & folders:
        reader.fail("files", f'has "{names[folded]}" both as a file and as a folder')
    return files


def fold(path: str) -> str:
    """Return what a file system that ignores case (and Unicode's spellings) takes `path` for."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def _file(value: object, where: str) -> CoreFile:
    reader = Reader(value, where, CoreError)
    path = reader.text("path", limit=4096)
    if path:
        check_relative_path(path, f"{where}: the path", CoreError)
        first = fold(path.split("/")[0])
        # Markers and locks of the caches begin with a dot; the primary is renamed there.
        if first.startswith(".") or first == CACHED_PRIMARY:
            raise CoreError(f'{where}: the path "{path}" is reserved at the root of a core.')
    file = CoreFile(path, reader.count("offset"), reader.count("size"), reader.hex("sha256", DIGEST_SIZE))
    reader.finish()
    if _DIGEST_NAMED.match(path) and path != f"{file.sha256.hex()}.safetensors":
        raise CoreError(f'{where}: "{path}" is named by a SHA-256 that is not its own.')
    return file


def _rank_runs(
    reader: Reader, ranks: int, layout: Layout, files: tuple[CoreFile, ...]
) -> tuple[array[int] | None, ...]:
    lists = reader.raw("rank_ranges")
    if not isinstance(lists, list) or len(lists) != ranks:
        reader.fail("rank_ranges", f"is not a list of {ranks} entries, one a rank")
    if lists[0] is not None:
        reader.fail("rank_ranges", "does not give rank 0 the complete core (null)")
    if layout == "single_host" and any(runs is not None for runs in lists):
        reader.fail("rank_ranges", "splits a single_host core, whose ranks are one process")
    result: list[array[int] | None] = []
    count = 0
    for rank, runs in enumerate(lists):
        if runs is None:
            result.append(None)
            continue
        if not isinstance(runs, list):
            reader.fail("rank_ranges", f"[{rank}] is neither null nor a list")
        count += len(runs)
        if count > MAX_RUNS:
            reader.fail("rank_ranges", f"has more than {MAX_RUNS} runs")
        result.append(_checked_runs(reader, rank, runs, files))
    return tuple(result)


def _checked_runs(reader: Reader, rank: int, runs: list[Any], files: tuple[CoreFile, ...]) -> array[int]:
    packed = array("Q")
    previous = (0, 0)  # the first (file number, offset) that the next run may begin at
    for number, run in enumerate(runs):
        where = f"[{rank}][{number}]"
        if (
            not isinstance(run, list)
            or len(run) != 3
            or not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in run)
        ):
            reader.fail("rank_ranges", f"{where} is not [file number, offset, length]")
        file, offset, length = run
        if file >= len(files) or length == 0 or offset + length > files[file].size:
            reader.fail("rank_ranges", f"{where} lies outside the core's files")
        if offset % BLOCK_SIZE or (length % BLOCK_SIZE and offset + length != files[file].size):
            reader.fail("rank_ranges", f"{where} is not made of whole blocks")
        if (file, offset) < previous:
            reader.fail("rank_ranges", f"{where} overlaps the run before it or is out of order")
        previous = (file, offset + length)
        packed.extend(run)
    return packed
