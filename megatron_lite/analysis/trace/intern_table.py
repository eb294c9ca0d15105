"""Values as numbers."""


class Numbered(dict):
    """value -> its number, in the order of first appearance."""

    def __missing__(self, value):
        self[value] = number = len(self)
        return number
