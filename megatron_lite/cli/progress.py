"""How far a command is that works through documents."""

from megatron_lite.live_line import LiveLine
from megatron_lite.units import count, size


class DocumentProgress(LiveLine):
    """Called with documents and bytes of text, as data.preprocess reports them."""

    def __call__(self, documents: int, text_bytes: int):
        self.draw(f"{count(documents)} documents, {size(text_bytes)}")
