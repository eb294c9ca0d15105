"""Python stacks, captured in microseconds and spelt out once each."""

import sys
from types import CodeType

# what records, or calls what records: no part of the stack that is recorded
RECORDERS = (
    "megatron_lite/instruments/",
    "/torch/utils/_python_dispatch.py",
    "/torch/_compile.py",
    "/torch/_dynamo/eval_frame.py",
)
DEEPEST = 100


class Stacks:
    """Gives the calling stack as a list of {filename, line, name}, innermost first; equal stacks are one list."""

    def __init__(self):
        self._known: dict[tuple, list[dict]] = {}
        self._frames: dict[tuple[int, int], dict] = {}
        self._codes: dict[int, CodeType] = {}  # keeps them alive: a code's id must stay its own

    def capture(self, operation: str = "") -> list[dict]:
        """The calling stack without those who record; `operation` stands before it like a C++ frame.

        Empty on a thread of torch's own, where Python has no frames but the recorders'.
        """
        frame, key = sys._getframe(1), [operation]
        add = key.append  # this loop is most of what recording costs
        while frame is not None:
            add(id(frame.f_code))
            add(frame.f_lasti)
            frame = frame.f_back
        key = tuple(key)
        if key not in self._known:
            self._known[key] = self._spell(operation, sys._getframe(1))
        return self._known[key]

    def _spell(self, operation: str, frame) -> list[dict]:
        frames = [{"filename": "??", "line": 0, "name": operation}] if operation else []
        began = False
        for _ in range(DEEPEST):
            if frame is None:
                break
            code = frame.f_code
            self._codes[id(code)] = code
            began = began or not any(part in code.co_filename for part in RECORDERS)
            if began:
                place = (id(code), frame.f_lasti)
                if place not in self._frames:
                    self._frames[place] = {
                        "filename": code.co_filename,
                        "line": frame.f_lineno or 0,
                        "name": code.co_name,
                    }
                frames.append(self._frames[place])
            frame = frame.f_back
        return frames
