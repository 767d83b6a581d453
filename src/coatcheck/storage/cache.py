"""What a process has read of remote blobs, in memory up to a bound: checked frames, the oldest unused go first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

LIMIT: Final = 64 << 20


class FrameCache:
    """Frames by place and number. A place names one copy forever, so nothing in here grows stale."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._held = 0
        self._frames: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, place: str, index: int) -> memoryview | None:
        with self._lock:
            frame = self._frames.get((place, index))
            if frame is not None:
                self._frames.move_to_end((place, index))
            return frame

    def keep(self, place: str, index: int, frame: memoryview) -> None:
        with self._lock:
            if (place, index) not in self._frames:
                self._frames[place, index] = frame
                self._held += len(frame)
            while self._held > self._limit:
                self._held -= len(self._frames.popitem(last=False)[1])

    def drop(self, place: str) -> None:
        """Forget a copy that is removed."""
        with self._lock:
            for key in [key for key in self._frames if key[0] == place]:
                self._held -= len(self._frames.pop(key))

    def clear(self) -> None:
        with self._lock:
            self._frames.clear()
            self._held = 0
