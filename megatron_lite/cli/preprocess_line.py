"""The line that shows how far a preprocessing is."""

import time

from megatron_lite.live_line import LiveLine
from megatron_lite.units import count, duration, size


class PreprocessLine(LiveLine):
    """Called with documents, bytes of text and the share of the input that is done, as data.preprocess reports them.

    Rates and the time left are measured from the first report on: an interrupted run may have done much before.
    """

    def __init__(self):
        super().__init__()
        self._first = None

    def __call__(self, documents: int, text_bytes: int, share: float):
        now = (time.monotonic(), documents, text_bytes, share)
        self._first = self._first or now
        seconds, more_documents, more_bytes, more_share = (new - old for new, old in zip(now, self._first))
        text = f"{count(documents)} documents, {size(text_bytes)}, {share:.0%}"
        if seconds > 0 and more_share > 0:
            left = seconds * (1 - share) / more_share
            text += (
                f", {count(more_documents / seconds)} documents/s, {size(more_bytes / seconds)}/s, "
                f"{duration(left)} left"
            )
        self.draw(text)
