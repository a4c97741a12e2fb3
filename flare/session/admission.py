"""How many strangers may be at the door at once. Pure: the monotonic time comes in as an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flare.session.addresses import network_of

MAX_UNFINISHED = 64  # handshakes under way; each costs a socket and a key agreement
MAX_UNFINISHED_PER_ADDRESS = 16  # so that one host cannot fill the table alone
HANDSHAKE_TIMEOUT = 10.0  # seconds for a whole handshake
MAX_STRANGERS = 32  # sessions whose key is neither a controller's nor in a live grant
STRANGER_FRAME_TIMEOUT = 10.0  # seconds to each frame of a stranger
# A stranger that has said nothing useful for this many seconds gives its place to the next one. An honest
# one (a node with a grant, a controller that pairs) needs a fraction of it.
STRANGER_GRACE = 2.0


@dataclass(eq=False, slots=True)
class Place:
    """One place in a table.

    Args:
        network: whose it is.
        since: monotonic seconds.
        drop: ends whatever holds the place.
    """

    network: str
    since: float
    drop: Callable[[], None] = field(repr=False)


class Admission:
    """Counts unfinished handshakes and strangers' sessions.

    When a table is full the oldest is dropped, not the newest refused: whoever fills it with silent
    connections keeps nobody out.
    """

    def __init__(self) -> None:
        self._unfinished: dict[Place, None] = {}  # a dict keeps the order of arrival
        self._strangers: dict[Place, None] = {}

    @property
    def unfinished(self) -> int:
        """How many handshakes are under way."""
        return len(self._unfinished)

    @property
    def strangers(self) -> int:
        """How many strangers hold a session."""
        return len(self._strangers)

    def begin(self, host: str, now: float, drop: Callable[[], None]) -> Place:
        """Take a place for a new connection; drops the oldest of its address, or of all, where full.

        Args:
            host: the remote address.
            now: monotonic seconds.
            drop: called when the place is needed for another.
        """
        network = network_of(host)
        same = [place for place in self._unfinished if place.network == network]
        if len(same) >= MAX_UNFINISHED_PER_ADDRESS:
            self._drop(same[0])
        elif len(self._unfinished) >= MAX_UNFINISHED:
            self._drop(next(iter(self._unfinished)))
        place = Place(network, now, drop)
        self._unfinished[place] = None
        return place

    def end(self, place: Place) -> None:
        """Give a handshake's place back: it finished, failed or was dropped."""
        self._unfinished.pop(place, None)

    def admit_stranger(self, host: str, now: float, drop: Callable[[], None]) -> Place | None:
        """Take a stranger's place, or None while all are held by strangers that just came.

        Args:
            host: the remote address.
            now: monotonic seconds.
            drop: called when the place is needed for another.
        """
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            if now - oldest.since < STRANGER_GRACE:
                return None
            self.release_stranger(oldest)
            oldest.drop()
        place = Place(network_of(host), now, drop)
        self._strangers[place] = None
        return place

    def release_stranger(self, place: Place) -> None:
        """Give a stranger's place back: the session ended, or is no stranger's any more."""
        self._strangers.pop(place, None)

    def _drop(self, place: Place) -> None:
        self._unfinished.pop(place, None)
        place.drop()
