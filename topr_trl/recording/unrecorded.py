"""Tell the user about requests that the recorder passes on without recording them."""

from collections import Counter

from aiohttp import web

_MOST_NAMES = 20  # maximum number of separate counts, because paths can have ids
_OTHERS = "Requests to other paths"
_READING = ("GET", "HEAD", "OPTIONS")  # methods that no API uses to generate text


class Unrecorded:
    """Counts of the requests that were passed on and not recorded. The first request of each count is printed.

    Attributes:
        counts (`Counter[str]`): Number of requests by method, path and reason.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, request: web.Request, reason: str = "") -> None:
        """Count a request. Requests that only read, such as `GET /v1/models`, do not count.

        Args:
            request (`web.Request`): Request.
            reason (`str`, *optional*, defaults to `""`): Reason, if the recorder records other requests of this path.
        """
        if request.method in _READING:
            return
        path = ascii(request.rel_url.raw_path[:100])[1:-1]  # An unescaped path could control the terminal.
        name = f"{request.method} {path}{f' ({reason})' if reason else ''}"
        if name not in self.counts and len(self.counts) >= _MOST_NAMES:
            name = _OTHERS
        if name not in self.counts:
            print(f"Note: {name}: passed on and not recorded.", flush=True)
        self.counts[name] += 1
