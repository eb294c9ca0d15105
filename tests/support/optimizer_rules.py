"""The optimizer's rules written out, one parameter at a time."""


class Rules:
    """Halve once `hysteresis` overflows are used up; double after `window` clean steps, which restores them."""

    def __init__(self, scale: float, minimum: float, window: int, hysteresis: int):
        self.scale, self.minimum, self.window, self.hysteresis = scale, minimum, window, hysteresis
        self.clean, self.left = 0, hysteresis

    def update(self, overflow: bool):
        if overflow:
            self.clean = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self.clean += 1
        if self.clean == self.window:
            self.clean, self.left = 0, self.hysteresis
            self.scale *= 2
